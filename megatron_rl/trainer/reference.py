"""The seam of the reference policy: its methods for a run, and the part of a run without a KL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from megatron_rl.backend.batch import Batch
from megatron_rl.trainer.advantages.source import MeasuredKL
from megatron_rl.types import StepResult


class Reference(Protocol):
    """Gives the policy that a run's KL is measured against. Methods are collectives unless they say otherwise.

    is_needed: whether a KL is measured at all.
    """

    is_needed: bool

    @property
    def coefficient(self) -> float:
        """Return β of the rollout that is trained now, or of the next one. Not a collective."""
        ...

    @property
    def loss_coefficient(self) -> float:
        """Return β if the KL is in the loss, 0 if it is in the reward. Not a collective."""
        ...

    def keep(self) -> None:
        """Make the policy's current weights the reference."""
        ...

    def logprobs(self, batch: Batch, chosen: np.ndarray) -> np.ndarray:
        """Return log π_ref, float32 [T] flat, of the samples ``chosen`` ([S] bool); 0 for the others."""
        ...

    def measure(self, result: StepResult) -> None:
        """Count one optimizer step's KL, if the KL is in the loss. Not a collective."""
        ...

    def after_rollout(self, index: int, num_samples: int, kl: MeasuredKL | None = None) -> None:
        """Adjust the coefficient after rollout ``index``, and renew the reference if that is due.

        num_samples: the rollout's samples, dropped ones too.
        kl: the KL in the reward; None without one, and for a rollout that does not train the
            policy.
        """
        ...

    def state(self) -> dict[str, float | None]:
        """Return a checkpoint's state, between rollouts, as JSON-able values. Not a collective."""
        ...

    def load_state(self, state: Mapping[str, float | None]) -> None:
        """Take over a checkpoint's state, after the backend was loaded."""
        ...


class NoReference:
    """Stands for the reference of a run without a KL: it keeps no weights and changes no coefficient."""

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
