"""Operations become messages to all ranks, and their outcomes become answers; on rank 0, in its main thread.

It also keeps count of what the ranks hold in memory: models that are not held are made from their last saved state
before their operation runs, and the one that was used longest ago, of a silent session, makes room.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from megatron_rl.config.serve import ServeConfig
from megatron_rl.serve import naming
from megatron_rl.serve.books import Books, spec_facts
from megatron_rl.serve.journal import Journal
from megatron_rl.serve.operations import Operation, Operations
from megatron_rl.serve.store import DONE, FAILED
from megatron_rl.serve.values import TICK_S, Fault, Message, Outcome
from megatron_rl.serve.wire import PROTOBUF, sample_answer, training_answer

log = logging.getLogger(__name__)
JSON = "application/json"
SWEEP_S = 30.0
Runner = Callable[[Message], Outcome]


class Dispatcher:
    """Runs operations, one message after the other.

    run: runs a message on every rank.
    """

    def __init__(
        self, settings: ServeConfig, books: Books, operations: Operations, journal: Journal, run: Runner
    ) -> None:
        self.settings, self.books, self.operations, self.journal, self.run = settings, books, operations, journal, run
        self.held: OrderedDict[str, None] = OrderedDict()  # models, the one used longest ago first
        self.weights: OrderedDict[str, None] = OrderedDict()  # of samplers, likewise
        self._swept_at = time.monotonic()

    def step(self) -> None:
        """Run what comes next, or tell the ranks that nothing does."""
        taken = self.operations.take(TICK_S)
        if not taken:
            self.run(Message(header={"do": "tick"}))
        elif taken[0].kind == "sample":
            self._sample(taken)
        else:
            self._one(taken[0])
        if time.monotonic() - self._swept_at > SWEEP_S:
            self._sweep()

    # ---- a model's operation ----------------------------------------------------------------------------------------

    def _one(self, operation: Operation) -> None:
        header = dict(operation.header)
        if header["do"] == "fail":
            if operation.depends and operation.line in self.held:
                self.run(Message(header={"do": "discard", "model": operation.line}))
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
            header["spec"] = spec_facts(self.books.spec(operation.line))
        if header["do"] == "snapshot":
            self._make_room(str(header["weights"]))
        began = time.monotonic()
        outcome = self.run(Message(header=header, body=operation.body, parsed=operation.parsed))
        if outcome.error is not None:
            self._fail(operation, outcome.error, outcome.fault)
            return
        self.held[operation.line] = None
        self.held.move_to_end(operation.line)
        content, kind = self._answer(operation, header, outcome)
        self.operations.finish(operation, content, kind)
        seconds = time.monotonic() - began
        if operation.kind == "optim_step":
            self._count_step(operation, outcome.value, seconds)
        elif operation.kind == "forward_backward":
            self.journal.add(operation.line, outcome.value.metrics, seconds)

    def _fail(self, operation: Operation, message: str, fault: Fault) -> None:
        log.warning("%s %s of %s failed: %s", operation.kind, operation.seq, operation.line, message)
        if operation.depends:
            self.journal.discard(operation.line)
        self.operations.fail(operation, message, fault)

    def _exists(self, path: str) -> bool:
        return self.books.has_checkpoint(naming.parse_checkpoint(path))

    def _hold(self, model: str, *, makes: bool) -> tuple[str, Fault] | None:
        """Have the ranks hold a model; return the error where they cannot. ``makes``: the operation makes it."""
        if model in self.held:
            return None
        if len(self.held) >= self.settings.max_models:
            idle = next((x for x in self.held if self.books.is_silent(x, self.settings.session_s)), None)
            if idle is None:
                return (
                    f"{len(self.held)} models are in training, and serve.max_models allows no more; end a session, or "
                    "raise it",
                    Fault.SERVER,
                )
            self._drop_model(idle)
        if makes:
            return None
        outcome = self.run(Message(header=self.books.restore_header(model)))
        if outcome.error is not None:
            return f"model {model} cannot be made from its last saved state: {outcome.error}", outcome.fault
        self.books.store.update("models", model, stepped=-1)  # no step since what is saved
        self.held[model] = None
        return None

    def _drop_model(self, model: str) -> None:
        """Save a model's latest step and have the ranks forget it; its client is told of a gradient that is lost."""
        facts = self.books.store.get("models", model).facts
        if facts["stepped"] > facts["saved"]["seq"]:
            self._save_own(model, facts["stepped"])
        self.run(Message(header={"do": "drop", "models": [model], "weights": []}))
        del self.held[model]
        lost = self.books.lost_words(model)
        if lost is not None:
            text = lost[0].replace("the server was started again", "its session was silent and its place was taken")
            self.operations.fail_line(model, (text, lost[1]))

    def _make_room(self, weights: str) -> None:
        self.weights[weights] = None
        self.weights.move_to_end(weights)
        if len(self.weights) > self.settings.max_samplers:
            oldest, _ = self.weights.popitem(last=False)
            self.run(Message(header={"do": "drop", "models": [], "weights": [oldest]}))

    def _answer(self, operation: Operation, header: Mapping, outcome: Outcome) -> tuple[bytes, str]:
        """Write down what an operation has changed, and return its answer."""
        model, seq, value = operation.line, operation.seq, outcome.value
        match header["do"]:
            case "forward_backward":
                return training_answer(value), PROTOBUF
            case "create":
                return _json({"model_id": model, "type": "create_model"})
            case "load":
                self.books.store.update("models", model, spec=value["spec"])
                self.books.note_saved(model, seq, pathlib.Path(header["folder"]), with_adam=header["with_adam"])
                return _json({"path": header["path"], "model_id": model, "type": "load_weights"})
            case "save":
                return self._saved(operation, header)
            case "snapshot":
                facts = {"weights": header["weights"], "folder": None, "path": None}
                base = self.books.store.get("models", model).facts["base_model"]
                session = model.partition(":")[0]
                sampler = str(header["sampler"])
                self.books.open_sampler(sampler, operation.owner, session, {**facts, "base_model": base})
                return _json({"sampling_session_id": sampler, "type": operation.kind})
        return _json({"metrics": value})

    def _saved(self, operation: Operation, header: Mapping) -> tuple[bytes, str]:
        path = naming.parse_checkpoint(str(header["path"]))
        self.books.note_checkpoint(
            path, operation.owner, seq=operation.seq, ttl_s=header["ttl_s"], metadata=header["metadata"]
        )
        self.weights.pop(str(path), None)
        self.run(Message(header={"do": "drop", "models": [], "weights": [str(path)]}))  # read anew if overwritten
        if header["with_adam"]:
            self.books.note_saved(operation.line, operation.seq, pathlib.Path(header["folder"]), with_adam=True)
        return _json({"path": str(path), "type": operation.kind})

    def _count_step(self, operation: Operation, metrics: Mapping[str, float], seconds: float) -> None:
        """Count an optimizer step, and save the model where ``serve.save_every_steps`` says so."""
        model, every = operation.line, self.settings.save_every_steps
        steps = self.books.store.get("models", model).facts["steps"] + 1
        self.books.store.update("models", model, steps=steps, stepped=operation.seq)
        self.journal.step(model, steps, metrics, seconds)
        if every and steps % every == 0:
            self._save_own(model, operation.seq)

    def _save_own(self, model: str, seq: int) -> None:
        """Save the state after a model's optimizer step ``seq``, as what it goes on from."""
        # two folders by turns: the one that is written down is whole whenever the server dies
        folders = [self.books.root / model.replace(":", "_") / "auto" / name for name in ("0", "1")]
        noted = self.books.store.get("models", model).facts["saved"]["folder"]
        folder = folders[noted == str(folders[0].absolute())]
        header = {"do": "save", "model": model, "folder": str(folder.absolute()), "with_adam": True}
        outcome = self.run(Message(header={**header, "spec": spec_facts(self.books.spec(model))}))
        if outcome.error is None:
            self.books.note_saved(model, seq, folder, with_adam=True)
        else:
            log.error("model %s was not saved after request %d: %s", model, seq, outcome.error)

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
        outcome = self.run(Message(header=header))
        for number, operation in enumerate(operations):
            if outcome.error is not None:
                self._fail(operation, outcome.error, outcome.fault)
            else:
                self.operations.finish(operation, sample_answer(outcome.value[number]), PROTOBUF)

    # ---- housekeeping -----------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Forget results that nobody asks for, and remove checkpoints that have expired."""
        self._swept_at = time.monotonic()
        self.operations.forget(self.settings.keep_results_s)
        for row in self.books.expired():
            remove_checkpoint(self.books, row.id)


def remove_checkpoint(books: Books, path: str) -> None:
    """Remove a checkpoint, on disk too."""
    row = books.store.get("checkpoints", path)
    books.store.remove("checkpoints", path)
    shutil.rmtree(row.facts["folder"], ignore_errors=True)


def note_end(books: Books) -> Callable[[Operation], None]:
    """Return what writes down that an operation has ended."""

    def ended(operation: Operation) -> None:
        if operation.kind != "sample":
            books.store.end(operation.id, DONE if operation.error is None else FAILED)

    return ended


def restore_lines(books: Books, operations: Operations) -> int:
    """Open the lines of the models of an earlier run; return how many of them have lost something."""
    losers = 0
    for row in books.store.everything("models"):
        lost = books.lost_words(row.id)
        operations.open_line(row.id, first=books.next_seq(row.id), failed=lost)
        losers += lost is not None
    return losers


def _json(value: Mapping) -> tuple[bytes, str]:
    return json.dumps(value).encode(), JSON
