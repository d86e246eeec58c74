"""A teacher's weights on the policy's ranks: a second, frozen model with the policy's parallel degrees."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from megatron_rl.backend.schedule import Schedule
from megatron_rl.backend.trainable_model import TrainableModel
from megatron_rl.config import DataConfig, LoraConfig, RolloutConfig
from megatron_rl.errors import ConfigError
from megatron_rl.model.build import settled_shape
from megatron_rl.model.frozen import build_frozen
from megatron_rl.model.settings import ModelSettings
from megatron_rl.validate import check_lengths
from megatron_rl.validate.critic import teacher_config
from megatron_rl.weights.config_json import load_hf_config
from megatron_rl.weights.export import load_weights
from megatron_rl.weights.reader import HuggingFaceReader, check_tensors

SETTING = "teacher.hf_path"


class TeacherWeights:
    """Holds the teacher, a frozen model that forward passes can run in place of the policy.

    Its weights stay on the device for good, in the policy's dtype. It has no gradient and no
    optimizer.
    """

    def __init__(self, model: TrainableModel) -> None:
        """Build the model of ``teacher.hf_path`` and load its weights. A collective.

        model: the policy.

        Raises ConfigError if the teacher cannot read the policy's samples.
        """
        self.model, path = model, model.config.teacher.hf_path
        hf_config = look_at_teacher(path, model.config.data, model.config.rollout, model.hf_config.vocab_size)
        config = dataclasses.replace(teacher_config(model.config), lora=LoraConfig())
        settings = ModelSettings.of(config)
        reader = HuggingFaceReader(path)
        shape = settled_shape(settings, hf_config, model.topology)
        check_tensors(reader, shape, allow_unread=config.model.allow_unread_tensors)
        self.chunks, self.shape = build_frozen(settings, hf_config, model.topology)
        load_weights([chunk.module for chunk in self.chunks], self.shape, model.topology, reader)
        reader.close()
        self.schedule = Schedule(self.chunks, model.topology)
        by_transformer_engine = self.shape.layer_spec == "transformer_engine"
        self.packer = dataclasses.replace(model.packer, for_transformer_engine=by_transformer_engine)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Return a context in which the policy's forward passes run the teacher's frozen model, not the policy's."""
        model = self.model
        own = model.chunks, model.schedule, model.shape, model.packer
        model.chunks, model.schedule, model.shape, model.packer = self.chunks, self.schedule, self.shape, self.packer
        try:
            yield
        finally:
            model.chunks, model.schedule, model.shape, model.packer = own


def look_at_teacher(path: str, data: DataConfig, rollout: RolloutConfig, vocab_size: int):
    """Return the teacher's Hugging Face config; raise ConfigError if the teacher cannot read the policy's samples.

    path: ``teacher.hf_path``.
    vocab_size: the number of tokens in the policy's vocabulary.
    """
    teacher, name = load_hf_config(path, SETTING), f"{SETTING}={path!r}"
    check_lengths(data, rollout, teacher.max_position_embeddings, of=name)
    if teacher.vocab_size < vocab_size:
        raise ConfigError(
            f"{name} has a vocabulary of {teacher.vocab_size} tokens and the policy's has {vocab_size}, so it cannot "
            "read the policy's tokens; give a teacher with the policy's tokenizer"
        )
    return teacher
