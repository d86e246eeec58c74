"""The engine of a run without completions, such as a supervised run. It holds no weights and starts no process."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

import torch

from megatron_rl.observability.prometheus.live import EngineReading
from megatron_rl.rollout.engines.engine import NO_WEIGHTS, OnFinished, SyncReport
from megatron_rl.rollout.engines.sampling import SampleRequest, SampleResult
from megatron_rl.types import Prompt, Rollout


class IdleEngine:
    """Stands in for an Engine in a run that samples nothing. Sending it weights or requests is a bug of the caller."""

    weight_version = NO_WEIGHTS
    lacks_weights = False
    lost: Sequence[str] = ()
    is_elsewhere, progressed_at = False, -math.inf

    def recover(self, lost: Sequence[str]) -> Sequence[str]:
        return ()

    def leave_out(self, names: Collection[str]) -> None:
        return None

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> SyncReport:
        raise AssertionError("a run without completions sends no weights (Config.generates)")

    def take_report(self, version: int, failed: Collection[str], lost: Collection[str]) -> None:
        return None

    def generate(
        self,
        prompts: Sequence[Prompt],
        samples_per_prompt: int | Sequence[int],
        *,
        temperature: float | None = None,
        max_tokens: Sequence[int] | None = None,
        on_finished: OnFinished | None = None,
    ) -> list[Rollout]:
        raise AssertionError("a run without completions asks for none (Config.generates)")

    def sample(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        raise AssertionError("a run without completions asks for none (Config.generates)")

    def readings(self) -> Sequence[EngineReading]:
        return ()

    def sleep(self) -> None:
        return None

    def wake(self, *, tags: Sequence[str]) -> None:
        return None

    def close(self) -> None:
        return None
