"""The choice of checkpoints that a run can resume from, and the check that their model is this run's.

No tensor is read.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence

from megatron_rl.checkpoint.folder import DamagedCheckpoint, name_of
from megatron_rl.errors import CheckpointError
from megatron_rl.weights.model_shape import ModelShape

# ROOT lies in the run's folder, the others lie in ROOT
ROOT, CRITIC, SUPERVISED = "checkpoints", "critic", "supervised"
# The identity of an older checkpoint lacks later fields; its model has none of the features that they describe.
WITHOUT_LATER_FIELDS = {
    field.name: [] if field.default == () else field.default
    for field in dataclasses.fields(ModelShape)
    if field.default is not dataclasses.MISSING
} | {"frozen_weights": None}
# Fields of a ModelShape that may differ between a save and a load.
OF_THE_RUN = ("layer_spec", "padded_vocab_size", "context_tokens", "value_head", "num_extra_layers", "stage_layers")


def resumable(
    root: pathlib.Path, iterations: Sequence[int], of_critic: Sequence[int] | None, supervised: Sequence[int]
) -> list[pathlib.Path]:
    """Return the folders of the checkpoints that a run may resume from, newest first.

    Checkpoints of the supervised start, the fine-tuning before the first rollout, come last.

    iterations, of_critic, supervised: the iterations of the complete checkpoints under ``root``,
        ``critic/`` and ``supervised/``, oldest first. ``of_critic`` is None for a run without a
        critic.

    Raises CheckpointError if the run has a critic, and no policy checkpoint has a critic's of the
    same iteration.
    """
    if of_critic is not None and iterations:
        both = [iteration for iteration in iterations if iteration in of_critic]
        if not both:
            raise CheckpointError(
                f"{root} holds {len(iterations)} checkpoints of a policy and {root / CRITIC} none of a critic that "
                "belong to them, and advantage.estimator=gae asks for one; restore them, or start from an exported "
                "policy in another run.dir"
            )
        iterations = both
    folders = [root / name_of(iteration) for iteration in reversed(iterations)]
    return folders + [root / SUPERVISED / name_of(steps) for steps in reversed(supervised)]


def identity_of_shape(shape: ModelShape) -> dict[str, object]:
    """Return the fields of a model's ``identity`` (model_state.py) that follow from its shape, adapters included."""
    fields = dataclasses.asdict(shape) | {"lora_targets": sorted(shape.lora_targets)}
    own = {name: value for name, value in sorted(fields.items()) if name not in OF_THE_RUN}
    return json.loads(json.dumps(own))  # as it is read back: lists for tuples


def check_identity(own: Mapping[str, object], folder: pathlib.Path, model: Mapping[str, object]) -> None:
    """Raise CheckpointError if ``model``, the identity of a checkpoint's model, is not this run's.

    own: this run's ``model_state.identity``, or those fields of it that are known.
    folder: the checkpoint's folder, for the message.
    """
    model = {**WITHOUT_LATER_FIELDS, **model}
    if different := {name: (model.get(name), own[name]) for name in own if model.get(name) != own[name]}:
        summary = ", ".join(
            f"{name.replace('lora_', 'lora.')} {theirs} there and {ours} here"
            for name, (theirs, ours) in different.items()
        )
        settings = "the model.hf_path and model.dtype" if "frozen_weights" in different else "the model.hf_path"
        if "lora_rank" in different or set(different) <= {"lora_alpha", "lora_targets"}:
            settings = "the lora.rank (null for 0), lora.alpha and lora.targets"
        raise CheckpointError(
            f"{folder} is of another model: {summary}; give {settings} it was trained with, or another run folder"
        )


def damaged_words(error: DamagedCheckpoint) -> str:
    """Return the error message for a damaged checkpoint under ``checkpoint.on_damage=fail``."""
    return f"{error}; remove that folder, or set checkpoint.on_damage=previous"


def none_good_words(folders: Sequence[pathlib.Path], root: pathlib.Path) -> str:
    """Return the error message for a run whose checkpoints are all damaged."""
    return f"all {len(folders)} checkpoints in {root} are damaged; restore one, or set checkpoint.resume=never"
