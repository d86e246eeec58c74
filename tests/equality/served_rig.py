"""Opens a server's worker on this rank, without its front: what rank 0 would broadcast is given to every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from megatron_rl.backend import MegatronBackend
from megatron_rl.config import load_config
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.distributed.watchdog import open_watchdog
from megatron_rl.serve.models import Models
from megatron_rl.serve.samplers import Samplers
from megatron_rl.serve.values import AdapterSpec, Datum, Message, Outcome, TrainingCall
from megatron_rl.serve.worker import Worker
from tests.equality.served_data import SETTINGS

ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 0.0}
VOCAB = 17  # of the arithmetic model


class Served:
    """A worker, and short ways to give it messages."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.backend = worker, worker.models.backend

    def do(self, what: str, *, parsed: object = None, **header: object) -> Outcome:
        return self.worker.run(Message(header={"do": what, **header}, parsed=parsed))

    def value(self, what: str, **given: object) -> object:
        outcome = self.do(what, **given)
        assert outcome.error is None, outcome.error
        return outcome.value

    def create(self, model: str, spec: AdapterSpec | None = None) -> None:
        facts = None if spec is None else {name: getattr(spec, name) for name in ("rank", "seed", "attention", "mlp")}
        self.value("create", model=model, spec=facts)

    def train(self, model: str, loss: str, data: Sequence[Datum], *, forward_only: bool = False):
        call = TrainingCall(
            model_id=model, seq_id=1, loss=loss, settings=SETTINGS[loss], forward_only=forward_only, data=data
        )
        return self.value("forward_backward", model=model, parsed=call)

    def step(self, model: str, **changes: float) -> Mapping[str, float]:
        return self.value("optim_step", model=model, adam={**ADAM, **changes})

    def weights(self, model: str) -> dict[str, torch.Tensor]:
        """Return the model's trained weights, whole."""
        backend = self.worker.models.activate(model)
        export = backend.export_adapters if backend.shape.lora_rank else backend.export
        return {name: tensor.clone() for name, tensor in export()}

    def moments(self, model: str) -> list[torch.Tensor]:
        """Return this rank's AdamW tensors and its steps."""
        backend = self.worker.models.activate(model)
        found = []
        for part in backend.optimizer.megatron.chained_optimizers:
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    state = part.optimizer.state[parameter]
                    found += [parameter.detach().clone(), *(torch.as_tensor(state[k]).clone() for k in sorted(state))]
        return found


@contextlib.contextmanager
def open_served(path: str, folder: str, *overrides: str) -> Iterator[Served]:
    """path: a folder with ``model``. folder: of the run."""
    given = [f"model.hf_path={path}/model", f"run.dir={folder}", "run.deadline_s=60", *overrides]
    config = load_config(None, given)
    backend = MegatronBackend(config)
    try:
        with open_watchdog(backend.topology, config.run.deadline_s) as watchdog:
            models = Models(backend)
            tokenizer = load_tokenizer(config, backend.shape.vocab_size)
            samplers = Samplers(config, models, tokenizer)
            yield Served(Worker(config, models, samplers, watchdog))
            samplers.close()
    finally:
        backend.close(leave_world=False)


def same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> bool:
    return set(found) == set(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)


def largest_gap(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max(initial=0.0)) for a, b in zip(found, wanted, strict=True))
