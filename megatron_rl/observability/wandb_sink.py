"""The sink that sends a run's metrics, tables of completions and configuration to Weights & Biases (W&B)."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

from megatron_rl.errors import ConfigError
from megatron_rl.observability.completions import Completion, visible
from megatron_rl.observability.prometheus.live import ReadLive


class WandbSink:
    """Sends metrics, tables of completions and the resolved configuration to one W&B run.

    run_id: the W&B run to continue; None for a new one. Login, entity and WANDB_MODE=offline are
        W&B's own settings.
    """

    def __init__(self, run_dir: pathlib.Path, project: str, config: Mapping[str, object], run_id: str | None) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"metrics.wandb_project={project!r} and wandb cannot be imported; pip install wandb, or set it to null"
            ) from error
        try:
            self._run = wandb.init(
                project=project,
                dir=str(run_dir),
                name=run_dir.resolve().name,
                id=run_id,
                resume="allow" if run_id else None,
                config=dict(config),
                allow_val_change=True,
            )
        except wandb.Error as error:
            reason = " ".join(str(error).split())[:400]
            again = ", delete tracking.json to begin another W&B run" if run_id else ""
            raise ConfigError(
                f"metrics.wandb_project={project!r}: W&B does not start: {reason}; log in (wandb login), set "
                f"WANDB_MODE=offline{again}, or set it to null"
            ) from error
        self._table, self._teardown = wandb.Table, wandb.teardown
        self.run_id: str = self._run.id
        self._first_step: int = self._run.step  # the first step that W&B has not received

    def measured(self, stage: str, started_s: float, seconds: float) -> None:
        """Do nothing: ``write`` gets the seconds of a step's stages, as the metrics ``time/*``."""

    def write(self, step: int, scalars: Mapping[str, float], row: Mapping[str, object]) -> None:
        if step >= self._first_step:
            self._run.log({**scalars, "phase": row["phase"], "step_kind": row["step_kind"]}, step=step)

    def show(self, step: int, source: str, completions: Sequence[Completion]) -> None:
        if step < self._first_step:
            return
        texts = ("prompt", "response", "answer")
        columns = ["sample", *texts, "reward", "advantage", "finish_reason", "response_tokens", *completions[0].rewards]
        rows = [
            [
                c.sample,
                *(visible(getattr(c, name) or "") for name in texts),
                *(c.reward, c.advantage, c.finish_reason, c.response_tokens),
                *c.rewards.values(),
            ]
            for c in completions
        ]
        table = self._table(columns=columns, data=rows, allow_mixed_types=True)
        self._run.log({f"completions/{source}": table}, step=step)

    def follow(self, live: ReadLive) -> None:
        """Do nothing: this sink sends no values between steps."""

    def close(self, files: Sequence[pathlib.Path], *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
        self._teardown()  # wait for W&B's process, which writes its file a moment after finish() has returned
