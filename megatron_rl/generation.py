"""Rollouts as all ranks see them: weights to the engines, prompts to rollouts, and an engine's failure met by every rank together.

A device that trainer and engine share changes hands around both: the trainer's gradients and optimizer state leave it, the engine's
weights wake, weights are sent, the engine's keys and values wake, rollouts are made, the engine sleeps, the trainer's state returns.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from megatron_rl import exchange
from megatron_rl.config import Config, RolloutConfig
from megatron_rl.platform import HOST
from megatron_rl.rollout.engine import Engine, EngineLost
from megatron_rl.rollout.producer import Produced, Producer
from megatron_rl.rollout.shared_device import SharedDevice, Turn
from megatron_rl.types import EngineError, Prompt, Rollout, Score

log = logging.getLogger(__name__)
WARN_GAP = {"float32": 1e-3, "bfloat16": 0.05}  # nats per token in the mean; float32's is a hundred times what two right ones show


class Generation:
    """Methods are collectives.

    export:  the trainer's weights under their Hugging Face names (``MegatronBackend.export``), and ``version`` their version.
    offload, restore: the trainer's way off a shared device and back; None where the engine has a device of its own.
    share:   (this rank's number among the ranks with prompts, how many these are); None for a rank without an engine.
    """

    def __init__(
        self, engine: Engine, score: Callable[[Sequence[Rollout]], list[Score]] | None, config: Config, *,
        export: Callable[[], Iterator[tuple[str, torch.Tensor]]], version: Callable[[], int], share: tuple[int, int] | None,
        offload: Callable[[], object] | None = None, restore: Callable[[], None] | None = None,
    ):  # fmt: skip
        self.engine, self.config = engine, config
        self.producer = Producer(score, share)
        self._export, self._version = export, version
        self.device = SharedDevice(engine, offload, restore, self._note_memory)
        self.metrics: dict[str, float] = {}
        self.waited_s = 0.0  # for weights and rollouts since the last rollout's end
        self.last_end = time.perf_counter()
        self.totals = {"tokens": 0.0, "rollout_s": 0.0, "syncs": 0, "sync_s": 0.0, "sync_bytes": 0.0}

    # ---- weights ---------------------------------------------------------------------------------------------------

    def sync_weights(self) -> None:
        """Hands the engines the current weights, unless they all have them: a step that moved nothing sends nothing.

        A sync that fails anywhere is sent again whole, to engines that are started again where they were lost; EngineError, on every
        rank, after ``weight_sync.attempts``.
        """
        version, attempts = self._version(), self.config.weight_sync.attempts
        for attempt in range(1, attempts + 1):
            lost = self._lost_anywhere()
            behind = exchange.gather_json(self.engine.weight_version != version)
            if not any(behind) and not lost:
                return
            self._together(self.device.to_weights)
            self._recover(lost)
            report = self.engine.load_weights(self._export(), version)
            sent = exchange.gather_json([report.failed, report.lost, report.num_bytes, report.seconds])
            failed = {name: why for part in sent for name, why in part[0].items()}
            self.engine.take_report(version, failed, {name for part in sent for name in part[1]})
            if not failed:
                self._note_sync(sent)
                return
            told = "; ".join(f"{name}: {why}" for name, why in failed.items())
            log.warning("sync of weight version %d failed (attempt %d of %d): %s", version, attempt, attempts, told)
        raise EngineError(f"weight version {version} did not arrive in {attempts} attempts (weight_sync.attempts): {told}")

    def _recover(self, lost: Sequence[str]) -> None:
        unreached: list[str] = []
        self._together(lambda: unreached.extend(self.engine.recover(lost) or ()))
        everywhere = {name for part in exchange.gather_json(unreached) for name in part}
        if everywhere:
            self.engine.leave_out(everywhere)

    def _note_sync(self, sent: list) -> None:
        """sent: of each rank [failed, lost, bytes, seconds]."""
        num_bytes, seconds = max(part[2] for part in sent), max(part[3] for part in sent)
        self.waited_s += seconds
        self.totals["syncs"] += 1
        self.totals["sync_s"] += seconds
        self.totals["sync_bytes"] += num_bytes
        self.metrics["perf/weight_sync_bytes"] = float(num_bytes)
        self.metrics["perf/weight_sync_bytes_per_second"] = num_bytes / max(seconds, 1e-9)

    def _lost_anywhere(self) -> list[str]:
        return sorted({name for part in exchange.gather_json(self.engine.lost) for name in part})

    def _together(self, act: Callable[[], None]) -> None:
        error = None
        try:
            act()
        except Exception as met:  # noqa: BLE001 (raised on every rank by the next line, this one's first)
            error = met
        exchange.raise_together(error)

    # ---- rollouts --------------------------------------------------------------------------------------------------

    def produce(self, prompts: Sequence[Prompt], samples_per_prompt: int, *, greedy: bool = False) -> Produced:
        """This rank's share of scored rollouts. What an engine owes when it is lost is asked for again once it has weights again."""
        mine = self.producer.places(len(prompts))
        found: dict[int, list[Rollout]] = {}
        started = time.perf_counter()
        self._together(self.device.to_engine)
        while True:
            why = self._generate(prompts, [i for i in mine if i not in found], samples_per_prompt, greedy, found)
            lost = {rank: text for rank, text in enumerate(exchange.gather_json(why)) if text is not None}
            if not lost:
                break
            for rank, text in lost.items():
                log.warning("rank %d lost its engine; what it owes is asked for again: %s", rank, text)
            self.sync_weights()
            self._together(self.device.to_engine)
        generated = time.perf_counter()
        self._together(self.device.to_trainer)
        rollouts = [rollout for i in mine for rollout in found[i]]
        self._note_rollouts(rollouts, generated - started)
        produced: list[Produced] = []
        self._together(lambda: produced.append(self.producer.score(rollouts, mine, samples_per_prompt, generated - started)))
        return produced[0]

    def _generate(
        self, prompts: Sequence[Prompt], places: Sequence[int], samples: int, greedy: bool, found: dict[int, list[Rollout]]
    ) -> str | None:
        """Adds to ``found``; why the engine was lost, or None. Every rank raises what one met."""
        error, why = None, None
        try:
            rollouts = self.engine.generate([prompts[i] for i in places], samples, greedy=greedy) if places else []
            found.update({place: rollouts[k * samples : (k + 1) * samples] for k, place in enumerate(places)})
        except EngineLost as lost:
            found.update({places[k]: rollouts for k, rollouts in lost.finished.items()})
            why = str(lost)
        except Exception as met:  # noqa: BLE001 (raised on every rank by the next line, this one's first)
            error = met
        exchange.raise_together(error)
        return why

    def _note_rollouts(self, rollouts: Sequence[Rollout], seconds: float) -> None:
        versions = [rollout.weight_version for rollout in rollouts]
        counted = exchange.gather_json([sum(len(rollout.response_ids) for rollout in rollouts), min(versions, default=None)])
        oldest = [part[1] for part in counted if part[1] is not None]
        tokens, now = sum(part[0] for part in counted), time.perf_counter()
        self.metrics["perf/rollout_tokens_per_second"] = tokens / max(seconds, 1e-9)
        self.metrics["perf/rollout_wait_share"] = (self.waited_s + seconds) / max(now - self.last_end, 1e-9)
        self.waited_s, self.last_end = 0.0, now
        self.totals["tokens"] += tokens
        self.totals["rollout_s"] += seconds
        if oldest:
            self.metrics["rollout/weight_version_min"] = float(min(oldest))

    def take_metrics(self) -> dict[str, float]:
        """What was measured since the last call; not a collective."""
        taken, self.metrics = self.metrics, {}
        return taken

    def _note_memory(self, ended: Turn) -> None:
        phase = {Turn.TRAINER: "update", Turn.WEIGHTS: "weight_sync", Turn.ENGINE: "rollout"}[ended]
        self.metrics[f"perf/{phase}_peak_memory_bytes"] = float(HOST.take_peak_memory_bytes())

    def summary(self, run_s: float) -> str:
        """One line for the log at a run's end. run_s: its whole time."""
        t = self.totals
        return (
            f"rollouts: {t['tokens']:,.0f} tokens, {t['tokens'] / max(t['rollout_s'], 1e-9):,.0f} a second; "
            f"weights sent {t['syncs']} times, "
            f"{t['sync_s'] / max(t['syncs'], 1):.3f} s and {t['sync_bytes'] / max(t['sync_s'], 1e-9) / 1e9:.2f} GB/s each; "
            f"{(t['rollout_s'] + t['sync_s']) / max(run_s, 1e-9):.0%} of {run_s:,.0f} s waited for the two"
        )

    def close(self) -> None:
        self.engine.close()


def guard_logprob_gap(sums: Mapping[str, float], rollout: RolloutConfig, dtype: str) -> None:
    """Warns, or raises EngineError, where trainer and engine give other log-probs to the same tokens (in the mean, nats per token).

    sums: of a log-prob pass, over all ranks; see MegatronBackend.forward. A pass of no token says nothing. dtype: model.dtype.
    """
    if not sums.get("tokens"):
        return
    mean, highest = sums["logprob_gap_abs"] / sums["tokens"], sums["logprob_gap_max"]
    found = f"the engine's log-probs are {mean:.3g} nats per token from the trainer's in the mean, {highest:.3g} at most"
    if not mean <= (math.inf if rollout.max_logprob_gap is None else rollout.max_logprob_gap):
        raise EngineError(
            f"{found}, above rollout.max_logprob_gap={rollout.max_logprob_gap}: it samples from other weights, another tokenizer, dtype or "
            "temperature. Compare them on one prompt (docs/vllm.md), or raise the setting if the difference is meant"
        )
    limit = WARN_GAP[dtype] if rollout.warn_logprob_gap is None else rollout.warn_logprob_gap
    if mean > limit:
        log.warning("%s, above rollout.warn_logprob_gap=%g", found, limit)
