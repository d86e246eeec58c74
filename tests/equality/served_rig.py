"""A server's worker without its HTTP routes, data of training requests, and the plain loop over them.

What rank 0 would broadcast is given to every rank.
"""

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
from megatron_rl.weights.fused import file_tensors
from tests.reference import gradient_of

ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 0.0}
VOCAB = 17  # of the arithmetic model
TINY_VOCAB = 99
SETTINGS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "cispo": {"clip_low_threshold": 0.5, "clip_high_threshold": 1.1},
    "dro": {"beta": 0.3},
    "gspo": {"clip_low_threshold": 0.97, "clip_high_threshold": 1.02},
}


def make_data(loss: str, count: int, *, seed: int = 0, wide: bool = False, vocab: int = TINY_VOCAB) -> list[Datum]:
    """Draw ragged data: every third datum without a coefficient, targets as a client likes. wide: several a token."""
    random = np.random.default_rng([seed, count])
    data = []
    for i in range(count):
        prompt, response = int(random.integers(1, 6)), int(random.integers(1, 12))
        tokens = random.integers(2, vocab, prompt + response + 1)
        length, width = len(tokens) - 1, int(random.integers(1, 4)) if wide else 1
        targets = tokens[1:, None]
        if wide or i % 2:  # a client pads the prompt's targets, or scores other tokens
            targets = random.integers(0, vocab, (length, width))
        coefficient = random.normal(0, 1, (length, width)) * (np.arange(length) >= prompt - 1)[:, None] * (i % 3 != 0)
        inputs = {"weights" if loss == "cross_entropy" else "advantages": coefficient.astype(np.float32)}
        if loss != "cross_entropy":
            inputs["logprobs"] = random.normal(-4.5, 0.3, (length, width)).astype(np.float32)
        if loss == "gspo":
            inputs["sequence_ratio_mask"] = (random.random((length, width)) < 0.7).astype(np.float32)
        data.append(Datum(tokens=tokens[:-1], targets=targets, inputs=inputs, flat=not wide))
    return data


def naive_logprobs(model: torch.nn.Module, datum: Datum) -> torch.Tensor:
    """Return log-probs [N, K] of a datum's targets by one plain forward."""
    distribution = model(torch.from_numpy(datum.tokens)[None]).logits[0].float().log_softmax(-1)
    return distribution.gather(-1, torch.from_numpy(datum.targets))


def naive_loss(loss: str, logprobs: torch.Tensor, datum: Datum) -> torch.Tensor:
    """Return the loss of Tinker's own formulas over one datum, in words of one line each."""
    given = {name: torch.from_numpy(values) for name, values in datum.inputs.items()}
    settings = SETTINGS[loss]
    low, high = settings.get("clip_low_threshold"), settings.get("clip_high_threshold")
    if loss == "cross_entropy":
        return -(given["weights"] * logprobs).sum()
    advantages, ratio = given["advantages"], (logprobs - given["logprobs"]).exp()
    match loss:
        case "importance_sampling":
            return -(ratio * advantages).sum()
        case "ppo":
            return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages).sum()
        case "cispo":
            return -(ratio.clamp(low, high).detach() * logprobs * advantages).sum()
        case "dro":
            square = (logprobs - given["logprobs"]) ** 2
            return -(logprobs * advantages - 0.5 * settings["beta"] * square).sum()
        case "gspo":
            marked = given["sequence_ratio_mask"] != 0
            gaps = (logprobs.detach() - given["logprobs"])[marked]
            mean = gaps.mean() if marked.any() else torch.zeros(())
            own = (mean + logprobs - logprobs.detach()).exp()
            return -torch.minimum(own * advantages, own.clamp(low, high) * advantages).sum()
    raise ValueError(loss)


def naive_gradient(model, calls) -> tuple[dict[str, torch.Tensor], list[float], list[list[np.ndarray]]]:
    """Return the gradient of all calls together, each call's loss, and the log-probs of its data."""
    model.zero_grad()
    losses, read = [], []
    for loss, data in calls:
        total, values = 0.0, []
        for datum in data:
            logprobs = naive_logprobs(model, datum)
            term = naive_loss(loss, logprobs, datum)
            term.backward()
            total += float(term.detach())
            values.append(logprobs.detach().numpy())
        losses.append(total)
        read.append(values)
    return file_tensors(gradient_of(model), model.config.model_type), losses, read


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
        call = TrainingCall(model_id=model, seq_id=1, loss=loss, settings=SETTINGS[loss], forward_only=forward_only,
                            data=data)
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
    config = load_config(None, [f"model.hf_path={path}/model", f"run.dir={folder}", "run.deadline_s=60", *overrides])
    backend = MegatronBackend(config)
    try:
        with open_watchdog(backend.topology, config.run.deadline_s) as watchdog:
            models = Models(backend)
            samplers = Samplers(models, load_tokenizer(config.model, backend.shape.vocab_size))
            yield Served(Worker(config.serve, models, samplers, watchdog))
            samplers.close()
    finally:
        backend.close(leave_world=False)


def largest_gap(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max(initial=0.0)) for a, b in zip(found, wanted, strict=True))
