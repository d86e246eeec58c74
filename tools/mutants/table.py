"""Holds the form of a mutant: one line of the package as a tired engineer might have written it, and the tests that
must see it."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass

# Each area with the files in which its faults stand; at least two faults in each.
AREAS: dict[str, tuple[str, ...]] = {
    "advantage": ("algorithm/advantage.py", "algorithm/finite.py"),
    "estimators": ("algorithm/estimators.py",),
    "gae": ("algorithm/gae.py",),
    "loss": (
        "algorithm/policy_loss.py",
        "algorithm/value_loss.py",
        "algorithm/objective.py",
        "algorithm/kl.py",
        "algorithm/kl_controller.py",
        "algorithm/importance.py",
    ),
    "signal": ("algorithm/signal.py",),
    "equal samples": ("algorithm/repeats.py",),
    "noise": ("algorithm/noise.py",),
    "plan": ("planning/plan.py", "planning/tokens.py", "planning/spread.py"),
    "cost": ("planning/cost.py",),
    "pipeline layout": ("planning/pipeline_layout.py",),
    "schedule": ("backend/schedule.py",),
    "optimizer": ("backend/optimizer.py", "backend/masters.py"),
    "packing": ("backend/packing.py", "model/attention/layout.py", "model/attention/packed.py"),
    "adapters": ("model/lora/adapters.py", "model/lora/layer.py"),
    "layers": ("model/post_norm.py",),
    "log-probs": (
        *("model/logprob/linear.py", "model/logprob/chunks.py", "model/logprob/kernels.py"),
        "model/logprob/row_invariant.py",
    ),
    "feed": (
        "rollout/queue.py",
        "rollout/scored_batch.py",
        "rollout/training_batch.py",
        "trainer/corrections.py",
        "trainer/decision.py",
        "trainer/update.py",
        *(f"trainer/advantages/{name}.py" for name in ("critic", "group", "kl_in_reward", "noise", "teacher")),
        "trainer/passes/old_logprobs.py",
        "rollout/groups/",
        "rollout/staleness.py",
    ),
    "routing": ("model/routing_replay.py", "backend/routing_replay.py", "backend/routed_rows.py"),
    "exchange": ("backend/batch_exchange.py",),
    "trained model": ("backend/trainable_model.py", "backend/step_sums.py"),
    "weights": ("weights/", "rollout/weight_sync/"),
    "sessions": ("rollout/endpoint/",),
    "drafts": ("rollout/speculation/",),
    "prefixes": ("rollout/engines/prefix_rows.py", "rollout/engines/grouped_queries.py"),
    "server": ("serve/",),
    "doors": ("rollout/http_",),
    "files of others": ("commands/convert/",),
    "checkpoints": ("checkpoint/",),
    "rewards": ("reward/", "rollout/reward_metrics.py"),
    "templates": ("data/",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """Names one fault and the tests that should fail with it.

    file:    from the repository's root.
    line:    the line as it stands there, without the space around it or its comment; it occurs once in the file.
    becomes: the line in its place, at the same depth; "" takes it out.
    fault:   what is wrong then, in words.
    tests:   pytest's node ids or files, the quickest first.
    """

    name: str
    file: str
    line: str
    becomes: str
    fault: str
    tests: tuple[str, ...]

    @property
    def area(self) -> str:
        within = self.file.removeprefix("megatron_rl/")
        (found,) = (name for name, files in AREAS.items() if within.startswith(files))
        return found

    def places(self, text: str) -> list[int]:
        """Numbers the lines of a file's text that are the mutant's, from 1."""
        return [number for number, line in enumerate(text.splitlines(), 1) if _code(line) == _code(self.line)]

    def planted(self, text: str) -> str:
        """Gives the file's text with the fault in it. Raises LookupError where the line does not occur exactly once."""
        places = self.places(text)
        if len(places) != 1:
            raise LookupError(
                f"{self.name}: the line occurs {len(places)} times in {self.file}, and must occur once: {self.line}"
            )
        lines = text.splitlines(keepends=True)
        old = lines[places[0] - 1]
        lines[places[0] - 1] = old.replace(old.strip(), self.becomes)
        return "".join(lines)


def _code(line: str) -> str:
    """Return a line without the space around it and the comment behind it."""
    return line.strip().partition("  # ")[0]


def read(root: pathlib.Path, mutant: Mutant) -> str:
    return (root / mutant.file).read_text(encoding="utf-8")
