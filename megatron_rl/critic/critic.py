"""PPO's critic on this rank: a model with a value head, its own optimizer and, if set, its own parallel degrees.

The value V_t is read from the hidden state before token t, as the policy's log-prob of t is. The
loss is a sum over tokens, each with the same factor as in the policy's loss (docs/semantics.md §8).
The critic learns also from samples whose advantages are 0. So only samples without a loss token are
dropped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from megatron_rl.algorithm.advantage import reduction_weights
from megatron_rl.algorithm.value_loss import value_loss
from megatron_rl.backend.batch import Batch
from megatron_rl.backend.offload import OffloadedBytes
from megatron_rl.backend.packing import PackedMicroBatch
from megatron_rl.backend.trainable_model import TrainableModel
from megatron_rl.checkpoint import model_state
from megatron_rl.checkpoint.folder import STATE, DamagedCheckpoint
from megatron_rl.checkpoint.state_file import read_model_state
from megatron_rl.checkpoint.writer import PendingSave
from megatron_rl.config import Config
from megatron_rl.critic.fresh_head import FreshHead
from megatron_rl.distributed import topology
from megatron_rl.model.head import values_of
from megatron_rl.types import StepPlan, StepResult, ValueInputs
from megatron_rl.validate.critic import critic_config
from megatron_rl.weights.reader import MemoryReader, WeightReader


class Critic(TrainableModel):
    """Trains the critic and computes its values. Methods are collectives, unless their docstrings say otherwise.

        critic = Critic(config, total_steps=100)
        values = critic.values(batch)                           # [T] flat
        metrics = critic.train(batch, returns, values)          # the critic's optimizer steps of a rollout

    It takes the policy's batches, and fetches the samples' contents that its own ranks need.
    """

    is_told_to_leave = False  # as in RemoteCritic; here the policy's ranks get signals themselves

    training, reading = "critic", "values"
    sum_names = ("loss", "tokens", "clipped", "value", "return", "return_squared", "error_squared")

    def __init__(
        self,
        config: Config,
        *,
        hf_config=None,
        weights: Mapping[str, torch.Tensor] | None = None,
        total_steps: int = 1,
        alone: bool = False,
    ) -> None:
        """Build the critic; TrainableModel describes the other arguments.

        config: the run's configuration; its ``critic`` section overrules the other sections.
        alone: whether the critic's ranks are separate. If not, a critic with the policy's parallel
            degrees shares the policy's process groups.
        """
        own = critic_config(config)
        self._total_steps = total_steps
        self.grid = None if alone or own.parallel == config.parallel else topology.Grid()
        shared = topology.current() if self.grid is None and not alone else None
        with self._here():
            super().__init__(
                own, hf_config=hf_config, weights=weights, total_steps=total_steps, value_head=True, grid=shared
            )

    def _here(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self.grid is None else self.grid.active()

    def _reader(self, weights: Mapping[str, torch.Tensor] | None) -> WeightReader:
        return FreshHead(super()._reader(weights), self.hf_config.hidden_size)

    def take_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Take the policy's weights, with a head of zeros, before the first step.

        tensors: the weights, from ``MegatronBackend.export``. They are held whole on the host
            meanwhile.
        """
        kept = {name: tensor.to("cpu", copy=True) for name, tensor in tensors}
        with self._here():
            self._load(FreshHead(MemoryReader(kept), self.shape.hidden_size))

    # ---- a rollout -------------------------------------------------------------------------------------------------

    def values(self, batch: Batch) -> np.ndarray:
        """Return the value of the state before each loss token, 0 at other response tokens.

        The result is float32 [T], sample after sample, on every rank.
        """
        own = dataclasses.replace(batch, rows={})
        with self._here():
            plan = self.plan_pass(own, own.facts.loss_tokens > 0)
            own = self.fetch_rows(own, plan)
            return self._read(own, plan, lambda _, hidden: (values_of(hidden, self.chunks[-1].module), {}))[0]

    def train(self, batch: Batch, returns: np.ndarray, old_values: np.ndarray) -> dict[str, float]:
        """Take the rollout's optimizer steps; return the metrics ``critic/*`` (``critic_metrics``).

        returns: [T], for each response token the value to learn, sample after sample.
        old_values: [T], the result of ``values`` before the first step.
        """
        own = dataclasses.replace(batch, rows={})
        with self._here():
            plan = self.plan_training(own, own.facts.loss_tokens > 0, drops=True)
            own = self.fetch_rows(own, plan)
            results = []
            for mini_batch, fingerprint in [
                *zip(plan.mini_batches, plan.fingerprints(), strict=True)
            ] * self.config.critic.epochs_per_rollout:
                self.accumulate(own, mini_batch, returns, old_values, fingerprint)
                results.append(self.optim_step(mini_batch.kind))
        return critic_metrics(results)

    def accumulate(
        self, batch: Batch, mini_batch: StepPlan, returns: np.ndarray, old_values: np.ndarray, fingerprint: bytes
    ) -> None:
        """Add the gradient of a mini-batch; ``batch.rows`` must hold the samples that this rank needs.

        returns, old_values: [T], as ``train`` takes them.
        fingerprint: the digest of the mini-batch's plan; ranks compare it before they start.

        The denominators of ``loss.reduction`` count all samples of the mini-batch.
        """
        longest = self.config.rollout.max_response_tokens
        weights = reduction_weights(
            self.config.loss.reduction, batch.facts, mini_batch.members, max_response_tokens=longest
        )
        inputs = ValueInputs(weights=weights, returns=returns, old_values=old_values)
        self._accumulate(batch, mini_batch, inputs, fingerprint, self._loss)

    def _loss(self, tokens: PackedMicroBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, dict]:
        values = values_of(hidden, self.chunks[-1].module)
        term = value_loss(values, tokens.old_values, tokens.returns, tokens.weights, clip=self.config.critic.value_clip)
        value, target = values.detach().double(), tokens.returns.double()
        counted = (torch.ones_like(value), term.clipped.double(), value, target, target**2, (value - target) ** 2)
        return term.loss, {"sums": torch.stack([term.loss.detach().double(), *(x.sum() for x in counted)])}

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def offload(self) -> OffloadedBytes:
        """Free device memory as ``TrainableModel.offload`` does; return the freed bytes. Not a collective."""
        with self._here():
            return super().offload()

    def restore(self) -> None:
        with self._here():
            super().restore()

    def save(self, root: pathlib.Path, iteration: int) -> PendingSave:
        """Begin to write a checkpoint: the critic's weights, AdamW's state, and counters in state.json.

        root: the folder of the critic's checkpoints.
        iteration: the checkpoint's number, as in the policy's checkpoint.
        """
        state = {"model": model_state.identity(self), "backend": model_state.numbers(self)}
        with self._here():
            return model_state.save(self, root, iteration, {STATE: json.dumps(state) + "\n"})

    def check(self, folder: pathlib.Path) -> None:
        """Raise CheckpointError if a checkpoint is of another model or damaged. Not a collective."""
        model_state.check_model(self, folder, read_model_state(folder)["model"])

    def load(self, folder: pathlib.Path) -> None:
        """Load a checkpoint of the critic, whatever parallel degrees it was saved under.

        Raises DamagedCheckpoint if its tensors cannot be read. AdamW is then reset, so that another
        checkpoint can be loaded.
        """
        state = read_model_state(folder)
        with self._here():
            try:
                model_state.load(self, folder, state["backend"], state["model"])
            except DamagedCheckpoint:
                self.reset_optimizer(total_steps=self._total_steps)
                raise

    def close(self, *, preempted: bool = False) -> None:
        """End the critic's threads and hooks; its process groups are destroyed with the policy's.

        preempted: not used here; RemoteCritic sends it to the critic's ranks.
        """
        self.retire()


def critic_metrics(results: Sequence[StepResult]) -> dict[str, float]:
    """Return the metrics ``critic/*`` of a rollout's steps.

    The loss is a mean over steps, the gradient norm the largest of all steps. Means over loss tokens
    are taken of values, returns and the clip ratio (the fraction of clipped values). Explained
    variance is 1 − Σ(R − V)² / Σ(R − mean R)², for returns R and the values V before each step.
    """
    sums = {name: sum(result.sums[name] for result in results) for name in Critic.sum_names}
    metrics = {
        "critic/loss": sums["loss"] / max(len(results), 1),
        "critic/grad_norm": float(np.max([result.grad_norm for result in results], initial=0.0)),  # NaN if any is NaN
        "critic/lr": results[-1].learning_rate if results else 0.0,
        "critic/steps": float(len(results)),
        "critic/applied": float(sum(result.applied for result in results)),
    }
    if tokens := sums["tokens"]:
        spread = sums["return_squared"] - sums["return"] ** 2 / tokens
        metrics |= {
            "critic/value_mean": sums["value"] / tokens,
            "critic/return_mean": sums["return"] / tokens,
            "critic/clip_ratio": sums["clipped"] / tokens,
        }
        if spread > 1e-12 * tokens:
            metrics["critic/explained_variance"] = 1.0 - sums["error_squared"] / spread
    return metrics
