"""The reference policy of a run: its log-probs, the KL's coefficient, and when it is renewed from the policy's weights.

The backend holds the weights themselves (backend/reference_weights.py). See docs/semantics.md §7
and docs/ppo.md.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from megatron_rl.algorithm.kl_controller import KLCoefficient
from megatron_rl.backend.backend import MegatronBackend
from megatron_rl.backend.batch import Batch
from megatron_rl.config import LossConfig, ReferenceConfig
from megatron_rl.errors import CheckpointError
from megatron_rl.trainer.advantages.source import MeasuredKL
from megatron_rl.types import StepResult


class ReferencePolicy:
    """Manages the reference policy, against which a run's KL is measured, and the KL's coefficient β.

    β is constant during a rollout, over all its mini-batches and epochs. An adaptive β changes once
    per rollout. Methods are collectives unless they say otherwise.
    """

    def __init__(self, loss: LossConfig, settings: ReferenceConfig, backend: MegatronBackend) -> None:
        self.backend = backend
        self.is_needed = loss.kl_coefficient != 0
        self.in_loss = self.is_needed and settings.kl_in == "loss"
        self.is_adaptive = settings.controller == "adaptive"
        self.refresh_every_rollouts = settings.refresh_every_rollouts
        self._controller = KLCoefficient(
            value=loss.kl_coefficient,
            target=settings.kl_target if self.is_adaptive else None,
            horizon=settings.kl_horizon,
        )
        self._kl = self._tokens = 0.0

    @property
    def coefficient(self) -> float:
        """Return the KL's coefficient β in the current rollout; between rollouts, in the next. Not a collective."""
        return self._controller.value

    @property
    def loss_coefficient(self) -> float:
        """Return the KL's coefficient β in the loss; 0 if the KL is in the reward. Not a collective."""
        return self.coefficient if self.in_loss else 0.0

    def keep(self) -> None:
        """Make the policy's current weights the reference; do nothing if no KL is measured."""
        if self.is_needed:
            self.backend.keep_reference()

    def logprobs(self, batch: Batch, chosen: np.ndarray) -> np.ndarray:
        """Return log π_ref of each response token of the batch on every rank: float32 [T], sample after sample.

        chosen: bool [S], the samples to compute; the log-probs of all others are 0.
        """
        with self.backend.reference_weights():
            return self.backend.logprobs(batch, chosen).flat

    # ---- the coefficient -------------------------------------------------------------------------------------------

    def measure(self, result: StepResult) -> None:
        """Add one optimizer step's KL over all ranks to the rollout's KL, if the KL is in the loss. Not a collective.

        A ghost step, which runs on a zero gradient, adds nothing. Neither does a step that was
        skipped because its gradient was not finite.
        """
        if self.is_needed and self.in_loss and result.applied:
            self.count(result.sums["kl"], result.sums["tokens"])

    def count(self, kl: float, tokens: float) -> None:
        """Add a KL in nats, summed over ``tokens`` tokens of all ranks, to the rollout's KL. Not a collective."""
        self._kl += kl
        self._tokens += tokens

    def observe(self, kl_per_token: float, num_samples: int) -> None:
        """Adjust an adaptive β by one rollout's KL, in nats per token; a fixed β stays.

        Not a collective, but every rank must make the same call. Raises ValueError if the KL is NaN
        (KLCoefficient.updated).
        """
        self._controller = self._controller.updated(kl_per_token, num_samples)

    def after_rollout(self, index: int, num_samples: int, kl: MeasuredKL | None = None) -> None:
        """Adjust β by the KL of rollout ``index``, after its last step, and renew the reference if that is due.

        To renew it is to make the policy's current weights the reference.

        index: counted from 0.
        num_samples: the number of the rollout's samples, dropped ones included.
        kl: the KL that was subtracted from the reward. None if the reward has no KL, or if the
            rollout did not train the policy.

        A rollout without a measured token leaves β as it is.
        """
        if kl is not None:
            self.count(kl.kl, kl.tokens)
        if self._tokens:
            self.observe(self._kl / self._tokens, num_samples)
        self._kl = self._tokens = 0.0
        if self.refresh_every_rollouts is not None and (index + 1) % self.refresh_every_rollouts == 0:
            self.keep()

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, float | None]:
        """Return the state that a checkpoint saves between two rollouts, as JSON-able values: an adaptive β."""
        return {"coefficient": self.coefficient if self.is_adaptive else None}

    def load_state(self, state: Mapping[str, float | None]) -> None:
        """Restore the state that a checkpoint has saved; call it after the backend was loaded.

        Raises CheckpointError if the reference is needed now and the checkpoint has none.
        """
        if self.is_needed and self.backend.reference is None:
            raise CheckpointError(
                f"loss.kl_coefficient={self.coefficient} needs the reference policy, and the checkpoint was taken "
                "without one, under loss.kl_coefficient=0; set it back to 0, or start another run from the exported "
                "policy"
            )
        if self.is_adaptive and state["coefficient"] is not None:
            self._controller = KLCoefficient(
                value=state["coefficient"], target=self._controller.target, horizon=self._controller.horizon
            )
