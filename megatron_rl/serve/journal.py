"""The writer of metrics files, one per model: `<run>/models/<model>/metrics.jsonl`.

Metrics have the names of a training run's metrics.

``python -m megatron_rl.observability.report <run>/models/<model>`` draws such a file. A row is
written at each ``optim_step``. It covers the training requests since the step before.
"""

from __future__ import annotations

import json
import math
import pathlib
import time
from collections import Counter
from collections.abc import Mapping

from megatron_rl.observability.metrics import METRICS_FILE
from megatron_rl.types import StepKind

PHASE = "serve"


class Journal:
    """Writes the metrics rows of all models, on rank 0 alone.

    root: the folder of the models' folders.
    config_yaml: the run's settings, which are copied into each model's folder.
    """

    def __init__(self, root: pathlib.Path, config_yaml: str) -> None:
        self.root, self.config_yaml = root, config_yaml
        self._sums: dict[str, Counter[str]] = {}
        self._stepped_at: dict[str, float] = {}

    def folder(self, model: str) -> pathlib.Path:
        """Return a model's folder. Colons in the model's name are replaced, since not every file system takes them."""
        return self.root / model.replace(":", "_")

    def add(self, model: str, metrics: Mapping[str, float], seconds: float) -> None:
        """Add a training request's metrics and its run time to the model's next row."""
        sums = self._sums.setdefault(model, Counter())
        sums.update({name.removesuffix(":sum"): value for name, value in metrics.items()})
        sums["seconds"] += seconds

    def discard(self, model: str) -> None:
        """Forget the metrics of the requests that a model got since its last step, as their gradient was discarded."""
        self._sums.pop(model, None)

    def step(self, model: str, number: int, metrics: Mapping[str, float], seconds: float) -> None:
        """Write the row of a model's ``number``-th optimizer step.

        metrics: the step's own metrics.
        seconds: the step's run time.
        """
        sums, now = self._sums.pop(model, Counter()), time.monotonic()
        ghost = metrics["ghost_steps:sum"] > 0
        row: dict[str, object] = {
            "step": number,
            "step_kind": (StepKind.GHOST if ghost else StepKind.REAL).value,
            "phase": PHASE,
            "train/loss": loss if math.isfinite(loss := sums["loss"]) else str(float(loss)),
            "train/grad_norm": metrics["grad_norm:mean"],
            "train/lr": metrics["learning_rate:mean"],
            "skip/tokens_executed": int(sums["num_tokens_executed"]),
            "skip/tokens_dense": int(sums["num_tokens"]),
            "time/update_s": sums["seconds"] + seconds,
            "time/step_s": now - self._stepped_at.get(model, now - sums["seconds"] - seconds),
        }
        if sums["num_data"]:
            row["skip/zero_advantage_ratio"] = sums["num_data_without_gradient"] / sums["num_data"]
        self._stepped_at[model] = now
        folder = self.folder(model)
        if not folder.exists():
            folder.mkdir(parents=True)
            (folder / "config.yaml").write_text(self.config_yaml, encoding="utf-8")
        with (folder / METRICS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
