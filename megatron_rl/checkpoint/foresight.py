"""The search, in a dry run, for the checkpoint from which a real start would resume. No model is built.

``CheckpointManager.load_newest`` follows the same rules, and loads the checkpoint.
"""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatron_rl.checkpoint.exports import exported_steps, exports_root_of, start_anew
from megatron_rl.checkpoint.folder import DamagedCheckpoint, verify, whole_checkpoints
from megatron_rl.checkpoint.pickled import check_torch_files
from megatron_rl.checkpoint.resume import (
    CRITIC,
    SUPERVISED,
    check_identity,
    damaged_words,
    none_good_words,
    resumable,
)
from megatron_rl.checkpoint.run_state import ResumePoint
from megatron_rl.checkpoint.state_file import read_model_state, read_state
from megatron_rl.config.run import CheckpointConfig
from megatron_rl.errors import CheckpointError, StoreError

if TYPE_CHECKING:
    from megatron_rl.storage.remote import RemotePath

log = logging.getLogger(__name__)


def foresee_resume(
    run_path: pathlib.Path,
    settings: CheckpointConfig,
    identity: Mapping[str, object],
    *,
    hf_path: str,
    has_critic: bool,
) -> ResumePoint | None:
    """Return the checkpoint that this run's start would resume from; None if it would begin anew. Write nothing.

    identity: the model's properties that a checkpoint must match (``model_state.identity``), as far
        as they are known without weights.
    hf_path: ``model.hf_path``.
    has_critic: whether the run trains a critic, which has checkpoints too.

    The names and sizes of all files are checked, and the content of state.json and of torch's
    index. Tensor files are not digested. Raises CheckpointError and ConfigError in the same cases
    as the real start.
    """
    root = settings.root(run_path)
    exports_root = exports_root_of(root, run_path)
    try:
        return _foreseen(root, exports_root, settings, identity, hf_path=hf_path, has_critic=has_critic)
    except StoreError as error:
        raise CheckpointError(f"the checkpoints cannot be looked at: {error}") from error


def _foreseen(
    root: pathlib.Path | RemotePath,
    exports_root: pathlib.Path | RemotePath,
    settings: CheckpointConfig,
    identity: Mapping[str, object],
    *,
    hf_path: str,
    has_critic: bool,
) -> ResumePoint | None:
    of_critic = whole_checkpoints(root / CRITIC) if has_critic else None
    iterations, supervised = whole_checkpoints(root), whole_checkpoints(root / SUPERVISED)
    if not (iterations or supervised) or settings.resume == "never":
        if iterations or supervised or exported_steps(exports_root):
            whole = [] if isinstance(root, pathlib.Path) else [*iterations, *supervised]
            start_anew((root, exports_root), hf_path, remote=whole, is_main=False)
        return None
    folders = resumable(root, iterations, of_critic, supervised)
    for folder in folders:
        try:
            verify(folder, share=None)
            state = read_state(folder)
            check_torch_files(folder)
            if of_critic is not None and folder.parent == root:
                verify(root / CRITIC / folder.name, share=None)
                read_model_state(root / CRITIC / folder.name)
            check_identity(identity, folder, state["model"])
        except DamagedCheckpoint as error:
            if settings.on_damage == "fail":
                raise DamagedCheckpoint(damaged_words(error)) from error
            log.error("%s; THE CHECKPOINT BEFORE IT WOULD BE USED", error)
            continue
        return ResumePoint(folder=folder, state=state)
    raise CheckpointError(none_good_words(folders, root))
