"""The exports of a run, checkpoints/step_<n>/hf; exports of an earlier run or of steps trained again are set aside."""

from __future__ import annotations

import logging
import pathlib
import re
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_rl.checkpoint.resume import ROOT
from megatron_rl.distributed.atomic_file import set_aside
from megatron_rl.errors import ConfigError

if TYPE_CHECKING:
    from megatron_rl.storage.remote import RemotePath

log = logging.getLogger(__name__)

STALE = "stale_"  # prefix of a folder's name, so that step_*/hf no longer matches it


def exports_root_of(root: pathlib.Path | RemotePath, run_path: pathlib.Path) -> pathlib.Path | RemotePath:
    """Return the folder of a run's exports: the store of its checkpoints, or the run's own folder.

    root: the folder of the run's checkpoints.
    """
    return run_path / ROOT if isinstance(root, pathlib.Path) else root


def exported_steps(root: pathlib.Path | RemotePath) -> list[int]:
    """Return the optimizer steps whose exports lie under ``root``, ascending; [] if there is no such folder."""
    if not isinstance(root, pathlib.Path):
        names = [name for name, size in root.children().items() if size is None]
    else:
        names = [path.name for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    matches = [re.fullmatch(r"step_(\d+)", name) for name in names]
    return sorted(int(match[1]) for match in matches if match)


def start_anew(
    roots: Sequence[pathlib.Path | RemotePath], hf_path: str, *, remote: Sequence[int] = (), is_main: bool
) -> None:
    """Set an earlier run's checkpoints and exports aside, on the main rank. Not a collective.

    roots: the folders of checkpoints and exports, which may be the same.
    remote: iterations in an object store, where nothing can be renamed.

    Raises ConfigError on every rank if the model to train is one of these exports, or if ``remote``
    is not empty.
    """
    if remote:
        raise ConfigError(
            f"checkpoint.resume=never, and checkpoint.dir={roots[0]} holds {len(remote)} checkpoints of an earlier "
            "run, which an object store cannot set aside; name another checkpoint.dir, or remove them"
        )
    folders = list(dict.fromkeys(root for root in roots if isinstance(root, pathlib.Path)))
    for root in folders:
        if pathlib.Path(hf_path).resolve().is_relative_to(root.resolve()):
            raise ConfigError(
                f"model.hf_path={hf_path} is an export of an earlier run in {root}, which this run would set aside; "
                "give it another run.dir"
            )
    for root in folders:
        if is_main and root.exists():
            set_aside(root)


def set_exports_aside(root: pathlib.Path | RemotePath, after_step: int) -> None:
    """Rename the exports of steps after ``after_step``, since the run is about to train these steps again.

    step_24 becomes stale_step_24; an older folder of that name is removed. An object store renames
    nothing: a warning names the exports that stay.
    """
    for step in exported_steps(root):
        if step > after_step:
            _set_aside(root, step, after_step)


def _set_aside(root: pathlib.Path | RemotePath, step: int, after_step: int) -> None:
    path = root / f"step_{step}"
    if not isinstance(path, pathlib.Path):
        log.warning(
            "%s is from after the checkpoint at step %d: it stays until this run exports that step again",
            path,
            after_step,
        )
        return
    stale = path.with_name(f"{STALE}{path.name}")
    shutil.rmtree(stale, ignore_errors=True)
    path.rename(stale)
    log.warning("%s is from after the checkpoint at step %d: kept as %s", path, after_step, stale.name)
