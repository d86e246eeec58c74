"""The coordinator, in rank 0's main thread: it has all ranks run the clients' requests, and makes the answers.

An operation is a queued request. The coordinator sends the ranks a message for it, and turns the
outcome into the answer. It also keeps track of what the ranks hold in memory: models, and weights
to sample with. If an operation's model is not in memory, the model is first restored from its last
saved state. If there is no room, the least recently used model whose session is silent is dropped.
A session is silent if its client has sent no request for ``serve.session_s`` seconds.

An error may happen on rank 0 alone, outside the ranks' work, such as a full disk, no free
descriptor, or a bug. Then the request ends with that error, the log has its traceback, and the
server goes on. ``serve/worker.py`` describes errors within a collective.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import pathlib
import shutil
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megatron_rl.config.serve import ServeConfig
from megatron_rl.errors import printable, shortened
from megatron_rl.rollout.http_connections import OncePerMinute
from megatron_rl.serve import naming
from megatron_rl.serve.checkpoints import link_copy
from megatron_rl.serve.codec import PROTOBUF, sample_answer, training_answer
from megatron_rl.serve.journal import Journal
from megatron_rl.serve.operation import ENDED, Operation
from megatron_rl.serve.operations import Operations
from megatron_rl.serve.registry import Registry, spec_facts
from megatron_rl.serve.store import DONE, FAILED
from megatron_rl.serve.values import TICK_S, Fault, Message, Outcome, SampleFailed

log = logging.getLogger(__name__)
# Lines of different models differ in kind.
log.addFilter(OncePerMinute(lambda x: (x.msg, x.args[2] if len(x.args or ()) > 2 else None)))
JSON = "application/json"
SWEEP_S = 30.0
Runner = Callable[[Message], Outcome]


class Coordinator:
    """Has all ranks run the clients' operations, one message after the other.

    run: a function that runs a message on every rank, and returns its outcome.
    """

    def __init__(
        self, settings: ServeConfig, registry: Registry, operations: Operations, journal: Journal, run: Runner
    ) -> None:
        self.settings, self.registry, self.operations = settings, registry, operations
        self.journal, self.run = journal, run
        self.held: OrderedDict[str, None] = OrderedDict()  # models in memory, the least recently used first
        self.weights: OrderedDict[str, None] = OrderedDict()  # sampler weights in memory, in the same order
        self._swept_at, self._ranks_failed = time.monotonic(), False

    def step(self) -> None:
        """Run the next operation. If there is none, send the ranks a tick, a message that does nothing."""
        taken = self.operations.take(TICK_S)
        if not taken:
            self._run(Message(header={"do": "tick"}))
        else:
            with self._contained(taken):
                self._sample(taken) if taken[0].kind == "sample" else self._one(taken[0])
        if time.monotonic() - self._swept_at > SWEEP_S:
            with self._contained():
                self._sweep()

    def _run(self, message: Message) -> Outcome:
        """Run a message on every rank and return its outcome.

        An error is raised again and ends the server, since the ranks may have stopped at different
        points.
        """
        try:
            return self.run(message)
        except BaseException:
            self._ranks_failed = True
            raise

    @contextlib.contextmanager
    def _contained(self, operations: Sequence[Operation] = ()) -> Iterator[None]:
        """Return a context that catches an error within it and ends the unfinished ``operations`` with that error.

        An error in sending a message to all ranks is not caught.
        """
        try:
            yield
        except Exception as error:
            if self._ranks_failed:
                raise
            log.exception("an error in the work on %s", ", ".join(x.id for x in operations[:3]) or "the housekeeping")
            for operation in operations:
                if operation.state != ENDED:
                    self._discard(operation)
                    words = f"the server could not record this request ({type(error).__name__}: {error})"
                    self._fail(operation, shortened(words, 500), Fault.SERVER)

    # ---- a model's operation ----------------------------------------------------------------------------------------

    def _one(self, operation: Operation) -> None:
        # Answer at once what needs no run: a failed request, a checkpoint that exists, a model without room.
        header = dict(operation.header)
        if header["do"] == "fail":
            self._discard(operation)
            self._fail(operation, str(header["error"]), Fault(header["fault"]))
            return
        if header["do"] == "save" and not header["overwrite"] and self._exists(str(header["path"])):
            self._fail(operation, f"{header['path']} exists; give another name, or overwrite=True", Fault.USER)
            return
        failed = self._hold(operation.line, makes=header["do"] in ("create", "load"))
        if failed is not None:
            self._fail(operation, *failed)
            return
        # Run the operation on all ranks.
        if header["do"] == "save":
            header["spec"] = spec_facts(self.registry.spec(operation.line))
        if header["do"] == "snapshot":
            self._make_room(str(header["weights"]))
        began = time.monotonic()
        outcome = self._run(Message(header=header, body=operation.body, parsed=operation.parsed))
        if outcome.error is not None:
            self._fail(operation, outcome.error, outcome.fault)
            return
        # Answer the client, and write the model's metrics.
        self.held[operation.line] = None
        self.held.move_to_end(operation.line)
        content, kind = self._answer(operation, header, outcome)
        self.operations.finish(operation, content, kind)
        with self._contained():  # the request has succeeded, even if its row cannot be written
            self._write(operation, outcome.value, time.monotonic() - began)

    def _write(self, operation: Operation, value: Any, seconds: float) -> None:
        if operation.kind == "optim_step":
            self._count_step(operation, value, seconds)
        elif operation.kind == "forward_backward":
            self.journal.add(operation.line, value.metrics, seconds)

    def _discard(self, operation: Operation) -> None:
        """Discard a model's accumulated gradient on all ranks, if training depends on the failed ``operation``.

        Otherwise a later optimizer step could use an incomplete gradient.
        """
        if operation.depends and operation.line in self.held:
            self._run(Message(header={"do": "discard", "model": operation.line}))

    def _fail(self, operation: Operation, message: str, fault: Fault) -> None:
        log.warning("%s %s of %s failed: %s", operation.kind, operation.seq, operation.line, printable(message))
        if operation.depends:
            self.journal.discard(operation.line)
        self.operations.fail(operation, message, fault)

    def _exists(self, path: str) -> bool:
        return self.registry.has_checkpoint(naming.parse_checkpoint(path))

    def _hold(self, model: str, *, makes: bool) -> tuple[str, Fault] | None:
        """Have all ranks hold a model in memory; return (message, fault) if they cannot, else None.

        makes: whether the next operation itself creates or loads the model, so that it need not be
            restored.
        """
        if model in self.held:
            return None
        if len(self.held) >= self.settings.max_models:
            idle = next((x for x in self.held if self.registry.is_silent(x, self.settings.session_s)), None)
            if idle is None:
                return (
                    f"{len(self.held)} models are in training, and serve.max_models allows no more; end a session, or "
                    "raise serve.max_models",
                    Fault.SERVER,
                )
            self._drop_model(idle)
        if makes:
            return None
        outcome = self._run(Message(header=self.registry.restore_header(model)))
        if outcome.error is not None:
            return f"model {model} cannot be made from its last saved state: {outcome.error}", outcome.fault
        self.registry.store.update("models", model, stepped=-1)  # no step since the saved state
        self.held[model] = None
        return None

    def _drop_model(self, model: str) -> None:
        """Drop a model from the memory of all ranks; first save its state if its last optimizer step is not saved.

        If an accumulated gradient is lost, the model's client is told.
        """
        facts = self.registry.store.get("models", model).facts
        if facts["stepped"] > facts["saved"]["seq"]:
            self._save_own(model, facts["stepped"])
        self._run(Message(header={"do": "drop", "models": [model], "weights": []}))
        del self.held[model]
        lost = self.registry.lost_words(model)
        if lost is not None:
            text = lost[0].replace("the server was started again", "its session was silent and its place was taken")
            self.operations.fail_line(model, (text, lost[1]))

    def _make_room(self, weights: str) -> None:
        self.weights[weights] = None
        self.weights.move_to_end(weights)
        if len(self.weights) > self.settings.max_samplers:
            oldest, _ = self.weights.popitem(last=False)
            self._run(Message(header={"do": "drop", "models": [], "weights": [oldest]}))

    def _answer(self, operation: Operation, header: Mapping, outcome: Outcome) -> tuple[bytes, str]:
        """Record a succeeded operation's changes in the store; return its answer as (bytes, content type).

        header: the header of the message that was run.
        """
        model, seq, value = operation.line, operation.seq, outcome.value
        match header["do"]:
            case "forward_backward":
                return training_answer(value), PROTOBUF
            case "create":
                return _json({"model_id": model, "type": "create_model"})
            case "load":
                self.registry.store.update("models", model, spec=value["spec"])
                self._go_on_from(model, seq, pathlib.Path(header["folder"]), with_adam=header["with_adam"])
                return _json({"path": header["path"], "model_id": model, "type": "load_weights"})
            case "save":
                return self._saved(operation, header)
            case "snapshot":
                facts = {"weights": header["weights"], "folder": None, "path": None}
                base = self.registry.store.get("models", model).facts["base_model"]
                session = model.partition(":")[0]
                sampler = str(header["sampler"])
                self.registry.open_sampler(sampler, operation.owner, session, {**facts, "base_model": base})
                return _json({"sampling_session_id": sampler, "type": operation.kind})
        return _json({"metrics": value})

    def _saved(self, operation: Operation, header: Mapping) -> tuple[bytes, str]:
        path = naming.parse_checkpoint(str(header["path"]))
        self.registry.note_checkpoint(
            path, operation.owner, seq=operation.seq, ttl_s=header["ttl_s"], metadata=header["metadata"]
        )
        self.weights.pop(str(path), None)
        # Weights of this path may be overwritten: the next sampling request reads the new ones.
        self._run(Message(header={"do": "drop", "models": [], "weights": [str(path)]}))
        if header["with_adam"]:
            self._go_on_from(operation.line, operation.seq, pathlib.Path(header["folder"]), with_adam=True)
        return _json({"path": str(path), "type": operation.kind})

    def _count_step(self, operation: Operation, metrics: Mapping[str, float], seconds: float) -> None:
        """Count an optimizer step, write its metrics, and save the model every ``serve.save_every_steps`` steps."""
        model, every = operation.line, self.settings.save_every_steps
        steps = self.registry.store.get("models", model).facts["steps"] + 1
        self.registry.store.update("models", model, steps=steps, stepped=operation.seq)
        self.journal.step(model, steps, metrics, seconds)
        if every and steps % every == 0:
            self._save_own(model, operation.seq)

    def _save_own(self, model: str, seq: int) -> None:
        """Save a model after its latest optimizer step. Later restores of the model start from this state.

        seq: the number of the operation that took the step.
        """
        folder = self._own_folder(model)
        header = {"do": "save", "model": model, "folder": str(folder), "with_adam": True}
        outcome = self._run(Message(header={**header, "spec": spec_facts(self.registry.spec(model))}))
        if outcome.error is None:
            self.registry.note_saved(model, seq, folder, with_adam=True)
        else:
            log.error("model %s was not saved after request %d: %s", model, seq, outcome.error)

    def _go_on_from(self, model: str, seq: int, folder: pathlib.Path, *, with_adam: bool) -> None:
        """Copy a checkpoint, and record the copy as the state from which a model restarts after operation ``seq``.

        A copy is needed, since the client may change the original.

        with_adam: whether the checkpoint holds AdamW's state too.
        """
        own = self._own_folder(model)
        link_copy(folder, own)
        self.registry.note_saved(model, seq, own, with_adam=with_adam)

    def _own_folder(self, model: str) -> pathlib.Path:
        """Return the folder for the next saved state from which a model restarts.

        A model has two such folders. The folder without the latest state is returned.
        """
        folders = [(self.registry.root / model.replace(":", "_") / "auto" / name).absolute() for name in ("0", "1")]
        noted = self.registry.store.get("models", model).facts["saved"]["folder"]
        return folders[noted == str(folders[0])]

    # ---- sampling ---------------------------------------------------------------------------------------------------

    def _sample(self, operations: Sequence[Operation]) -> None:
        header = dict(operations[0].header)
        name = str(header["weights"])
        if header["folder"] is None and name != naming.BASE and name not in self.weights:
            for operation in operations:
                self._fail(operation, f"sampler weights {name} are not kept any more; save them again", Fault.USER)
            return
        if name != naming.BASE:
            self._make_room(name)
        header["requests"] = [dataclasses.asdict(operation.parsed) for operation in operations]
        outcome = self._run(Message(header=header))
        for number, operation in enumerate(operations):
            with self._contained([operation]):
                self._answer_sample(operation, outcome, number)

    def _answer_sample(self, operation: Operation, outcome: Outcome, number: int) -> None:
        if outcome.error is not None:
            self._fail(operation, outcome.error, outcome.fault)
        elif isinstance(result := outcome.value[number], SampleFailed):
            self._fail(operation, f"the engine cannot answer this request: {result.reason}", Fault.SERVER)
        else:
            self.operations.finish(operation, sample_answer(result), PROTOBUF)

    # ---- housekeeping -----------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Forget old results that no client has asked for, and remove expired checkpoints."""
        self._swept_at = time.monotonic()
        self.operations.forget(self.settings.keep_results_s)
        for row in self.registry.expired():
            remove_checkpoint(self.registry, row.id)


def remove_checkpoint(registry: Registry, path: str) -> None:
    """Remove a checkpoint from the server's records and from disk."""
    row = registry.store.get("checkpoints", path)
    registry.store.remove("checkpoints", path)
    shutil.rmtree(row.facts["folder"], ignore_errors=True)


def note_end(registry: Registry) -> Callable[[Operation], None]:
    """Return a function that records an operation's end on disk (serve/store.py).

    If the record cannot be written, a client that asks after a restart is told that the operation
    was lost.
    """

    def ended(operation: Operation) -> None:
        if operation.kind == "sample":
            return
        try:
            registry.store.end(operation.id, DONE if operation.error is None else FAILED)
        except (OSError, sqlite3.Error) as error:
            log.error("the end of %s cannot be written down: %s", operation.kind, error)

    return ended


def restore_lines(registry: Registry, operations: Operations) -> int:
    """Open a queue of operations for each model of an earlier run.

    Returns for how many of these models the restart of the server lost operations.
    """
    losers = 0
    for row in registry.store.everything("models"):
        lost = registry.lost_words(row.id)
        operations.open_line(row.id, first=registry.next_seq(row.id), failed=lost)
        losers += lost is not None
    return losers


def _json(value: Mapping) -> tuple[bytes, str]:
    return json.dumps(value).encode(), JSON
