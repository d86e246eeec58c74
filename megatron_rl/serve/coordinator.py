"""Operations become messages to all ranks, and their outcomes become answers; on rank 0, in its main thread.

It also keeps count of what the ranks hold in memory: models that are not held are made from their
last saved state before their operation runs, and the one that was used longest ago, of a silent
session, makes room.

An error on rank 0 alone, around what the ranks do (a full disk, no descriptor left, a fault of
ours), is the error of the request that it befell: the log has its traceback, and the loop goes on.
What an error within a collective ends is said in ``serve/worker.py``.
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
log.addFilter(OncePerMinute(lambda x: (x.msg, x.args[2] if len(x.args or ()) > 2 else None)))  # by model
JSON = "application/json"
SWEEP_S = 30.0
Runner = Callable[[Message], Outcome]


class Coordinator:
    """Runs operations, one message after the other.

    run: runs a message on every rank.
    """

    def __init__(
        self, settings: ServeConfig, registry: Registry, operations: Operations, journal: Journal, run: Runner
    ) -> None:
        self.settings, self.registry, self.operations = settings, registry, operations
        self.journal, self.run = journal, run
        self.held: OrderedDict[str, None] = OrderedDict()  # models, the one used longest ago first
        self.weights: OrderedDict[str, None] = OrderedDict()  # of samplers, likewise
        self._swept_at, self._ranks_failed = time.monotonic(), False

    def step(self) -> None:
        """Run what comes next, or tell the ranks that nothing does."""
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
        """Run a message on every rank. An error of it leaves the ranks at different places, and nothing goes on."""
        try:
            return self.run(message)
        except BaseException:
            self._ranks_failed = True
            raise

    @contextlib.contextmanager
    def _contained(self, operations: Sequence[Operation] = ()) -> Iterator[None]:
        """Have an error of the block, unless it is of all ranks, be that of the operations that have not ended."""
        try:
            yield
        except Exception as error:
            if self._ranks_failed:
                raise
            log.exception("an error around %s", ", ".join(x.id for x in operations[:3]) or "the housekeeping")
            for operation in operations:
                if operation.state != ENDED:
                    self._discard(operation)
                    words = f"the server could not book this request ({type(error).__name__}: {error})"
                    self._fail(operation, shortened(words, 500), Fault.SERVER)

    # ---- a model's operation ----------------------------------------------------------------------------------------

    def _one(self, operation: Operation) -> None:
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
        if header["do"] == "save":
            header["spec"] = spec_facts(self.registry.spec(operation.line))
        if header["do"] == "snapshot":
            self._make_room(str(header["weights"]))
        began = time.monotonic()
        outcome = self._run(Message(header=header, body=operation.body, parsed=operation.parsed))
        if outcome.error is not None:
            self._fail(operation, outcome.error, outcome.fault)
            return
        self.held[operation.line] = None
        self.held.move_to_end(operation.line)
        content, kind = self._answer(operation, header, outcome)
        self.operations.finish(operation, content, kind)
        with self._contained():  # the request has run, whatever becomes of its row
            self._write(operation, outcome.value, time.monotonic() - began)

    def _write(self, operation: Operation, value: Any, seconds: float) -> None:
        if operation.kind == "optim_step":
            self._count_step(operation, value, seconds)
        elif operation.kind == "forward_backward":
            self.journal.add(operation.line, value.metrics, seconds)

    def _discard(self, operation: Operation) -> None:
        """Have the ranks discard the gradient before an operation that training depends on and that cannot run."""
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
        """Have the ranks hold a model; return the error where they cannot. ``makes``: the operation makes it."""
        if model in self.held:
            return None
        if len(self.held) >= self.settings.max_models:
            idle = next((x for x in self.held if self.registry.is_silent(x, self.settings.session_s)), None)
            if idle is None:
                return (
                    f"{len(self.held)} models are in training, and serve.max_models allows no more; end a session, or "
                    "raise it",
                    Fault.SERVER,
                )
            self._drop_model(idle)
        if makes:
            return None
        outcome = self._run(Message(header=self.registry.restore_header(model)))
        if outcome.error is not None:
            return f"model {model} cannot be made from its last saved state: {outcome.error}", outcome.fault
        self.registry.store.update("models", model, stepped=-1)  # no step since what is saved
        self.held[model] = None
        return None

    def _drop_model(self, model: str) -> None:
        """Save a model's latest step and have the ranks forget it; its client is told of a gradient that is lost."""
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
        """Write down what an operation has changed, and return its answer."""
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
        self._run(Message(header={"do": "drop", "models": [], "weights": [str(path)]}))  # read anew if overwritten
        if header["with_adam"]:
            self._go_on_from(operation.line, operation.seq, pathlib.Path(header["folder"]), with_adam=True)
        return _json({"path": str(path), "type": operation.kind})

    def _count_step(self, operation: Operation, metrics: Mapping[str, float], seconds: float) -> None:
        """Count an optimizer step, and save the model where ``serve.save_every_steps`` says so."""
        model, every = operation.line, self.settings.save_every_steps
        steps = self.registry.store.get("models", model).facts["steps"] + 1
        self.registry.store.update("models", model, steps=steps, stepped=operation.seq)
        self.journal.step(model, steps, metrics, seconds)
        if every and steps % every == 0:
            self._save_own(model, operation.seq)

    def _save_own(self, model: str, seq: int) -> None:
        """Save the state after a model's optimizer step ``seq``, as what it goes on from."""
        folder = self._own_folder(model)
        header = {"do": "save", "model": model, "folder": str(folder), "with_adam": True}
        outcome = self._run(Message(header={**header, "spec": spec_facts(self.registry.spec(model))}))
        if outcome.error is None:
            self.registry.note_saved(model, seq, folder, with_adam=True)
        else:
            log.error("model %s was not saved after request %d: %s", model, seq, outcome.error)

    def _go_on_from(self, model: str, seq: int, folder: pathlib.Path, *, with_adam: bool) -> None:
        """Have a model go on, after a restart, from a copy of a checkpoint: its client may remove or overwrite that."""
        own = self._own_folder(model)
        link_copy(folder, own)
        self.registry.note_saved(model, seq, own, with_adam=with_adam)

    def _own_folder(self, model: str) -> pathlib.Path:
        """Return where a model's next own state goes: of two folders the one that is not written down as the last."""
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
        """Forget results that nobody asks for, and remove checkpoints that have expired."""
        self._swept_at = time.monotonic()
        self.operations.forget(self.settings.keep_results_s)
        for row in self.registry.expired():
            remove_checkpoint(self.registry, row.id)


def remove_checkpoint(registry: Registry, path: str) -> None:
    """Remove a checkpoint, on disk too."""
    row = registry.store.get("checkpoints", path)
    registry.store.remove("checkpoints", path)
    shutil.rmtree(row.facts["folder"], ignore_errors=True)


def note_end(registry: Registry) -> Callable[[Operation], None]:
    """Return what writes down that an operation has ended; where it cannot, a restart tells its client of a loss."""

    def ended(operation: Operation) -> None:
        if operation.kind == "sample":
            return
        try:
            registry.store.end(operation.id, DONE if operation.error is None else FAILED)
        except (OSError, sqlite3.Error) as error:
            log.error("the end of %s cannot be written down: %s", operation.kind, error)

    return ended


def restore_lines(registry: Registry, operations: Operations) -> int:
    """Open the lines of the models of an earlier run; return how many of them have lost something."""
    losers = 0
    for row in registry.store.everything("models"):
        lost = registry.lost_words(row.id)
        operations.open_line(row.id, first=registry.next_seq(row.id), failed=lost)
        losers += lost is not None
    return losers


def _json(value: Mapping) -> tuple[bytes, str]:
    return json.dumps(value).encode(), JSON
