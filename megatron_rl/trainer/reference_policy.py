"""The reference policy of a run: when its weights become the policy's, what its KL costs, and the KL as a penalty per
token.

The weights themselves are the backend's to hold (backend/reference_weights.py). Semantics §7; docs/reference.md.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from megatron_rl.algorithm.kl_controller import KLCoefficient
from megatron_rl.backend.backend import MegatronBackend
from megatron_rl.backend.batch import Batch
from megatron_rl.config import Config
from megatron_rl.errors import CheckpointError
from megatron_rl.types import StepResult
from megatron_rl.validate import check_reference


class ReferencePolicy:
    """What a run does with the policy that its KL is measured against. Every method is a collective unless it says
    otherwise.

    One coefficient holds for a whole rollout, all its mini-batches and epochs; an adaptive one moves once per rollout.
    """

    def __init__(self, config: Config, backend: MegatronBackend) -> None:
        """Raises ConfigError for settings that do not go together."""
        check_reference(config)
        given = config.reference
        self.backend = backend
        self.is_needed = config.loss.kl_coefficient != 0
        self.in_loss = config.kl_in_loss
        self.is_adaptive = given.controller == "adaptive"
        self.refresh_every_rollouts = given.refresh_every_rollouts
        self._controller = KLCoefficient(
            value=config.loss.kl_coefficient,
            target=given.kl_target if self.is_adaptive else None,
            horizon=given.kl_horizon,
        )
        self._kl = self._tokens = 0.0

    @property
    def coefficient(self) -> float:
        """β of the rollout that is trained next, or now; not a collective."""
        return self._controller.value

    @property
    def loss_coefficient(self) -> float:
        """β where the KL is in the loss, 0 where it is in the reward; not a collective."""
        return self.coefficient if self.in_loss else 0.0

    def keep(self) -> None:
        """The policy's weights of now become the reference; nothing where no KL is measured."""
        if self.is_needed:
            self.backend.keep_reference()

    def logprobs(self, batch: Batch, chosen: np.ndarray) -> np.ndarray:
        """log π_ref, float32 [T] flat over the batch's response tokens, on every rank; 0 for samples that are not
        chosen [S] bool."""
        with self.backend.reference_weights():
            return self.backend.logprobs(batch, chosen).flat

    # ---- the coefficient -------------------------------------------------------------------------------------------

    def measure(self, result: StepResult) -> None:
        """Counts one optimizer step's KL, of all ranks, where the KL is in the loss; not a collective. A step that was
        not applied, whose gradient was not finite, counts nothing, and nor does a ghost."""
        if self.is_needed and self.in_loss and result.applied:
            self.count(result.sums["kl"], result.sums["tokens"])

    def count(self, kl: float, tokens: float) -> None:
        """Adds a sum over so many tokens, in nats, of all ranks, to what this rollout's KL is the mean of; not a
        collective."""
        self._kl += kl
        self._tokens += tokens

    def observe(self, kl_per_token: float, num_samples: int) -> None:
        """Moves an adaptive coefficient by one rollout's KL, in nats per token; not a collective, and to be called on
        every rank alike.

        Raises ValueError where the KL is NaN; see KLCoefficient.updated.
        """
        self._controller = self._controller.updated(kl_per_token, num_samples)

    def after_rollout(self, index: int, num_samples: int) -> None:
        """After rollout ``index``'s last step, counted from 0: moves the coefficient by its KL, and renews the
        reference where that is due.

        num_samples: of the rollout, dropped ones too. A rollout without a measured token moves no coefficient.
        """
        if self._tokens:
            self.observe(self._kl / self._tokens, num_samples)
        self._kl = self._tokens = 0.0
        if self.refresh_every_rollouts is not None and (index + 1) % self.refresh_every_rollouts == 0:
            self.keep()

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, float | None]:
        """What a checkpoint holds beside the weights, between rollouts, as JSON-able values. A fixed coefficient is the
        configuration's."""
        return {"coefficient": self.coefficient if self.is_adaptive else None}

    def load_state(self, state: Mapping[str, float | None]) -> None:
        """After the backend was loaded. Raises CheckpointError where its checkpoint was taken without the reference
        that is needed now."""
        if self.is_needed and self.backend.reference.tensors is None:
            raise CheckpointError(
                f"loss.kl_coefficient={self.coefficient} needs the reference policy, and the checkpoint was taken "
                "without one, under loss.kl_coefficient=0; set it back to 0, or start another run from the exported "
                "policy"
            )
        if self.is_adaptive and state["coefficient"] is not None:
            self._controller = KLCoefficient(
                value=state["coefficient"], target=self._controller.target, horizon=self._controller.horizon
            )
