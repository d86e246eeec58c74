"""The sink that writes a run's metrics, completions and configuration as TensorBoard's event files."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence

from megatron_rl.distributed.atomic_file import set_aside
from megatron_rl.errors import ConfigError
from megatron_rl.observability.completions import Completion, as_text, visible
from megatron_rl.observability.prometheus.live import ReadLive


class TensorBoardSink:
    """Writes event files under ``tensorboard/`` in the run's folder.

    last_step: the last step in the checkpoint of a resumed run; TensorBoard hides later points of
        the existing files. None for a new run, for which an existing folder is renamed.
    """

    def __init__(self, run_dir: pathlib.Path, config: Mapping[str, object], last_step: int | None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "metrics.tensorboard=true and tensorboard cannot be imported; pip install tensorboard, or turn it off"
            ) from error
        folder = run_dir / "tensorboard"
        if last_step is None and folder.exists():
            set_aside(folder)
        self._writer = SummaryWriter(log_dir=str(folder), purge_step=None if last_step is None else last_step + 1)
        if config:
            text = visible(json.dumps(config, indent=1, ensure_ascii=False))
            self._writer.add_text("config", _as_code(text), max(0, last_step or 0))

    def measured(self, stage: str, started_s: float, seconds: float) -> None:
        """Do nothing: ``write`` gets the seconds of a step's stages, as the metrics ``time/*``."""

    def write(self, step: int, scalars: Mapping[str, float], row: Mapping[str, object]) -> None:
        for key, value in scalars.items():
            self._writer.add_scalar(key, value, step)

    def show(self, step: int, source: str, completions: Sequence[Completion]) -> None:
        text = "\n\n".join(as_text(completion) for completion in completions)
        self._writer.add_text(f"completions/{source}", _as_code(text), step)

    def follow(self, live: ReadLive) -> None:
        """Do nothing: this sink sends no values between steps."""

    def close(self, files: Sequence[pathlib.Path], *, failed: bool) -> None:
        self._writer.close()


def _as_code(text: str) -> str:
    """Return Markdown that shows a text unchanged: an indented block, which no text inside can end."""
    return "\n".join(f"    {line}" for line in text.split("\n"))
