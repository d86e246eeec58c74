"""The rig of the equality tests: a backend over a tiny model, a batch spread over its ranks, one step's inputs."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from megatron_rl.algorithm.advantage import reduction_weights
from megatron_rl.algorithm.signal import has_signal
from megatron_rl.backend import MegatronBackend
from megatron_rl.backend.batch import Batch
from megatron_rl.config import Config, load_config
from megatron_rl.distributed import topology
from megatron_rl.types import BatchPlan, LossInputs, Sample, StepKind, StepResult
from tests.reference import LAYERS, file_weights, make_samples, near_policy, relative_error, tiny_model

MAX_RESPONSE_TOKENS = 16  # rollout.max_response_tokens of every rig; trainer/reference_policy.py's default too
DEFAULTS = (
    "plan.max_tokens_per_microbatch=40",
    f"rollout.max_response_tokens={MAX_RESPONSE_TOKENS}",
    "optimizer.distributed=false",
    "run.deadline_s=60",  # no collective of a test waits longer
)


def sizes(tensor: int = 1, pipeline: int = 1) -> tuple[str, str]:
    return f"parallel.tensor={tensor}", f"parallel.pipeline={pipeline}"


@dataclass(kw_only=True)
class Rig:
    """A backend, the Hugging Face model that it was built from, and the batch that every rank agrees on."""

    backend: MegatronBackend
    model: torch.nn.Module
    samples: list[Sample] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    batch: Batch | None = None

    @property
    def is_main(self) -> bool:
        return self.backend.topology.is_main

    @property
    def everyone(self) -> np.ndarray:
        return np.ones(len(self.samples), dtype=bool)

    @property
    def loss_mask(self) -> np.ndarray:
        """Return the mask over all response tokens, flat."""
        return np.concatenate([s.loss_mask for s in self.samples])

    def logprobs(self, chosen: np.ndarray | None = None) -> np.ndarray:
        """Return the log-probs of a pass over ``chosen``, or over everyone, flat."""
        return self.backend.logprobs(self.batch, self.everyone if chosen is None else chosen).flat

    def take(self, samples: list[Sample], groups: Sequence[int] | None = None) -> None:
        """Make ``samples`` the batch; sample i is produced by rank i mod world."""
        rank, world = self.backend.topology.rank, self.backend.topology.world_size
        self.samples, self.groups = samples, list(groups or [i // 2 for i in range(len(samples))])
        mine = [i for i in range(len(samples)) if i % world == rank]
        self.batch = self.backend.gather([samples[i] for i in mine], [self.groups[i] for i in mine], mine)

    def rules(self, **changes: object) -> None:
        """Set another cut into micro-batches, under the same weights."""
        self.backend.rules = dataclasses.replace(self.backend.rules, **changes)

    def plan(self, advantages: np.ndarray, *, drops: bool, passes: bool = False) -> BatchPlan:
        """Plan the batch and bring its rows; ``has_signal`` refuses an infinite advantage, so a large one stands in."""
        finite = np.nan_to_num(advantages, nan=np.nan, posinf=1.0, neginf=-1.0)
        return self.plan_of(has_signal(finite, self.batch.facts.loss_tokens), drops=drops, passes=passes)

    def plan_of(self, signal: np.ndarray, *, drops: bool, passes: bool = False) -> BatchPlan:
        """Plan the batch by a signal and bring its rows."""
        plans = self.backend.plan_pass if passes else self.backend.plan_training
        plan = plans(self.batch, signal, drops=drops)
        self.batch = self.backend.fetch_rows(self.batch, plan)
        return plan

    def inputs(self, advantages, members, *, reduction="token_mean", old=None, **more):
        """Return LossInputs with the weights of ``members``; ``old`` defaults to the samples' own log-probs."""
        weights = reduction_weights(reduction, self.batch.facts, members, max_response_tokens=MAX_RESPONSE_TOKENS)
        flat = np.concatenate([s.logprobs for s in self.samples]) if old is None else old
        return LossInputs(advantages=advantages * weights, weights=weights, old_logprobs=flat, **more)

    def accumulate(self, advantages: np.ndarray, plan: BatchPlan, position: int = 0, **given: object) -> None:
        """Run forward_backward of one of the plan's mini-batches."""
        self.run(plan, self.inputs(advantages, plan.mini_batches[position].members, **given), position)

    def run(self, plan: BatchPlan, inputs: LossInputs, position: int = 0) -> None:
        fingerprint = plan.fingerprints()[position]
        self.backend.forward_backward(self.batch, plan.mini_batches[position], inputs, fingerprint=fingerprint)

    def taken(self) -> dict[str, torch.Tensor]:
        """Return the gradient so far under Hugging Face names; the backend is left without one."""
        gradient = self.backend.gradient()
        self.backend.zero_grad()
        self.backend._sums.zero()
        return gradient

    def gradient(self, advantages, plan, position=0, **given) -> dict[str, torch.Tensor]:
        """Return one mini-batch's gradient; the backend is left without one."""
        self.accumulate(advantages, plan, position, **given)
        return self.taken()

    def errors(self, advantages: np.ndarray, wanted: dict[str, torch.Tensor], label: str = "") -> dict[str, float]:
        """Return the relative errors of the dense and of the skip run's gradient."""
        dense, skip = (self.gradient(advantages, self.plan(advantages, drops=drops)) for drops in (False, True))
        return {f"dense{label}": relative_error(dense, wanted), f"skip{label}": relative_error(skip, wanted)}

    def step(self, advantages: np.ndarray, *, drops: bool, **given: object) -> list[StepResult]:
        """Plan the batch and take all its optimizer steps."""
        plan = self.plan(advantages, drops=drops)
        results = []
        for position, mini_batch in enumerate(plan.mini_batches):
            self.accumulate(advantages, plan, position, **given)
            results.append(self.backend.optim_step(mini_batch.kind))
        return results

    def ghost(self) -> StepResult:
        """Take the step that follows when nothing of the batch has signal."""
        (result,) = self.step(np.zeros(len(self.samples)), drops=True)
        assert result.kind is StepKind.GHOST
        return result

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.backend.export()}

    def trained(self) -> dict[str, torch.Tensor]:
        """Return what the steps train: the adapters, or all weights."""
        exported = self.backend.export_adapters() if self.backend.shape.lora_rank else self.backend.export()
        return {name: x.clone() for name, x in exported}

    def optimizer_state(self) -> list[torch.Tensor]:
        """Return this rank's master weights, Adam moments and step counts, then the learning rate, in a fixed order."""
        found = []
        for part in self.backend.optimizer.megatron.chained_optimizers:
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    state = part.optimizer.state[parameter]
                    found += [parameter.detach().clone(), *(torch.as_tensor(state[k]).clone() for k in sorted(state))]
                found.append(torch.tensor(float(group["lr"])))
        return found


@functools.cache
def config_of(*overrides: str) -> Config:
    """Return the rigs' defaults under ``overrides``; frozen, so one for all that ask for the same."""
    return load_config(None, [*DEFAULTS, *overrides])


def layers_of(config: Config) -> int:
    """Return the tiny model's layers, or one for every stage where there are more stages."""
    return max(LAYERS, config.parallel.pipeline * config.parallel.virtual_pipeline)


@functools.cache
def near_samples(family: str, layers: int, count: int, unique_lengths: bool = False) -> tuple[Sample, ...]:
    """Draw samples with log-probs as an engine of slightly other weights would report, once per process."""
    return tuple(near_policy(tiny_model(family, layers=layers)[1], make_samples(count, unique_lengths=unique_lengths)))


@contextlib.contextmanager
def open_rig(family, *overrides, samples=0, unique_lengths=False, total_steps=1, layers=None) -> Iterator[Rig]:
    """Open a backend over tiny_model(family) and a batch. layers: None for as many as the stages need."""
    config = config_of(*overrides)
    layers = layers or layers_of(config)
    hf_config, model = tiny_model(family, layers=layers)
    with contextlib.ExitStack() as held:
        held.callback(topology.destroy)  # of a backend that could not be built
        backend = MegatronBackend(config, hf_config=hf_config, weights=file_weights(model), total_steps=total_steps)
        rig = Rig(backend=backend, model=model)
        if samples:
            rig.take(list(near_samples(family, layers, samples, unique_lengths)))
        held.pop_all()
        held.callback(backend.close, leave_world=False)
        yield rig


def ragged_advantages(count: int) -> np.ndarray:
    """Return advantages of both signs, every third exactly 0."""
    return np.array([0.0 if i % 3 == 0 else (i - count / 2) / 3 for i in range(count)])


def equal(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    """Return whether the tensors are bitwise equal, one by one (−0.0 counts as 0.0)."""
    return len(found) == len(wanted) and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def equal_by_name(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return set(found) == set(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)


class ForwardedLengths:
    """The sequence lengths that this stage's first layer was given, by torch's own hook."""

    def __init__(self, rig: Rig):
        self.lengths: list[int] = []
        rig.backend.chunks[0].module.decoder.layers[0].register_forward_pre_hook(self._record, with_kwargs=True)

    def _record(self, module, positional, named) -> None:
        self.lengths += list(named["packed_seq_params"].layout.lengths)

    def take(self) -> list[int]:
        taken, self.lengths = sorted(self.lengths), []
        return taken


def any_tokenizer():
    """Return a tokenizer that save_hugging_face only passes on."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))
