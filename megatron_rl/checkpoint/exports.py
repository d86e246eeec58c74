"""The listing and renaming of a run's Hugging Face exports, which lie in checkpoints/step_<n>/hf.

Exports of an earlier run, and of steps that a resumed run trains again, are renamed and kept.
"""

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
    """Return the folder under which a run's exports lie.

    With checkpoints on a disk it is ``<run>/checkpoints``. With checkpoints in an object store it
    is the checkpoints' folder there.

    root: the folder of the run's checkpoints, a RemotePath in an object store.
    run_path: the run's folder.
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
    """Rename an earlier run's folders of checkpoints and exports to ``<name>.1``, or .2, …, on the main rank.

    Every rank calls it, but it is not a collective.

    roots: the folders of the checkpoints and of the exports; the two may be the same.
    remote: iterations of the checkpoints in an object store, where nothing can be renamed.
    is_main: whether this is the main rank. Other ranks only check for errors.

    Raises ConfigError on every rank if ``hf_path``, the model to train, lies in one of the folders
    to rename, or if ``remote`` is not empty.
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

    step_24 becomes stale_step_24; an older folder of that name is removed. In an object store
    nothing can be renamed, so a warning names the exports that stay.
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
