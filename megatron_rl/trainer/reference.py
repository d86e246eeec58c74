"""The interface of the reference policy, and an implementation without effect for a run without a KL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from megatron_rl.backend.batch import Batch
from megatron_rl.trainer.advantages.source import MeasuredKL
from megatron_rl.types import StepResult


class Reference(Protocol):
    """Manages the reference policy, against which a run's KL is measured, and the KL's coefficient β.

    Methods are collectives unless they say otherwise.

    is_needed: whether a KL is measured at all.
    """

    is_needed: bool

    @property
    def coefficient(self) -> float:
        """Return the KL's coefficient β in the current rollout; between rollouts, in the next. Not a collective."""
        ...

    @property
    def loss_coefficient(self) -> float:
        """Return the KL's coefficient β in the loss; 0 if the KL is in the reward. Not a collective."""
        ...

    def keep(self) -> None:
        """Make the policy's current weights the reference."""
        ...

    def logprobs(self, batch: Batch, chosen: np.ndarray) -> np.ndarray:
        """Return log π_ref of the samples ``chosen`` (bool [S]); 0 for the others.

        The result is float32 [T], one number for each response token of the batch, sample after
        sample.
        """
        ...

    def measure(self, result: StepResult) -> None:
        """Add one optimizer step's KL to the rollout's KL, if the KL is in the loss. Not a collective."""
        ...

    def after_rollout(self, index: int, num_samples: int, kl: MeasuredKL | None = None) -> None:
        """Adjust β after rollout ``index``, and make the current policy the reference if that is due.

        num_samples: the number of the rollout's samples, dropped ones included.
        kl: the KL that was subtracted from the reward. None if the reward has no KL, or if the
            rollout did not train the policy.
        """
        ...

    def state(self) -> dict[str, float | None]:
        """Return JSON-able values: what a checkpoint keeps of the reference besides its weights. Not a collective."""
        ...

    def load_state(self, state: Mapping[str, float | None]) -> None:
        """Restore what ``state`` returned when the checkpoint was saved; call it after the backend was loaded."""
        ...


class NoReference:
    """Replaces the reference in a run without a KL: it keeps no weights, and its coefficient is 0."""

    is_needed, coefficient, loss_coefficient = False, 0.0, 0.0

    def keep(self) -> None:
        pass

    def logprobs(self, batch: Batch, chosen: np.ndarray) -> np.ndarray:
        raise ValueError("log π_ref is asked for under loss.kl_coefficient=0, which keeps no reference policy")

    def measure(self, result: StepResult) -> None:
        pass

    def after_rollout(self, index: int, num_samples: int, kl: MeasuredKL | None = None) -> None:
        pass

    def state(self) -> dict[str, float | None]:
        return {"coefficient": None}

    def load_state(self, state: Mapping[str, float | None]) -> None:
        pass
