"""A reward model on this rank: a model with a value head, whose number at a response's end is the response's score.

It is trained on preference pairs (trainer/preference.py). It is saved as transformers' sequence
classifier with one label, which a reward function (reward/reward_model.py) and a critic
(``critic.hf_path``) can read.
"""

from __future__ import annotations

import copy
import logging
import pathlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatron_rl.backend.batch import Batch
from megatron_rl.backend.packing import PackedMicroBatch
from megatron_rl.backend.trainable_model import TrainableModel
from megatron_rl.config import Config
from megatron_rl.critic.fresh_head import FreshHead
from megatron_rl.distributed import topology
from megatron_rl.model.head import values_of
from megatron_rl.types import LossInputs, StepPlan
from megatron_rl.weights.export import BUCKET_BYTES, export_weights, named_weights
from megatron_rl.weights.model_folder import Parameters, save_hugging_face
from megatron_rl.weights.reader import WeightReader

if TYPE_CHECKING:
    from megatron_rl.storage.remote import RemotePath

log = logging.getLogger(__name__)


class RewardModel(TrainableModel):
    """Trains a reward model and computes its scores.

    Every method is a collective unless its docstring says otherwise.
    """

    reading = "values"
    sum_names = ("loss", "tokens")

    def __init__(
        self, config: Config, *, hf_config=None, weights: Mapping[str, torch.Tensor] | None = None, total_steps: int = 1
    ) -> None:
        """Build the model with a value head; TrainableModel describes the arguments.

        The head is ``score.weight`` of the weights. If they have none, the head starts at 0.
        """
        super().__init__(config, hf_config=hf_config, weights=weights, total_steps=total_steps, value_head=True)

    def _reader(self, weights: Mapping[str, torch.Tensor] | None) -> WeightReader:
        return FreshHead(super()._reader(weights), self.hf_config.hidden_size)

    def scores(self, batch: Batch, chosen: np.ndarray) -> np.ndarray:
        """Return the value head's number for each loss token, read from the hidden state before the token.

        The result is float32 [T] over response tokens, sample after sample, on every rank; 0 at tokens
        without loss.

        chosen: bool [S], the samples to compute; all others have 0.
        """
        plan = self.plan_pass(batch, chosen)
        return self._read(
            self.fetch_rows(batch, plan),
            plan,
            lambda _, hidden: (values_of(hidden, self.chunks[-1].module), {}),
        )[0]

    def forward_backward(
        self, batch: Batch, mini_batch: StepPlan, inputs: LossInputs, *, fingerprint: bytes, supervised: bool = True
    ) -> None:
        """Add the gradient of −Σ_t w_t · V_t over loss tokens t, where V_t is the value head's number.

        inputs: its ``weights`` are w.
        fingerprint: the digest of the plan of this mini-batch; ranks compare it before they start.
        supervised: has no effect; callers pass it as to ``MegatronBackend.forward_backward``.
        """
        self._accumulate(batch, mini_batch, inputs, fingerprint, self._loss)

    def _loss(self, tokens: PackedMicroBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, dict]:
        values = values_of(hidden, self.chunks[-1].module)
        loss = -(tokens.weights * values).sum()
        return loss, {"sums": torch.stack([loss.detach().double(), torch.ones_like(values).sum().double()])}

    def export(self, *, bucket_bytes: int = BUCKET_BYTES) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) for every weight, ``score.weight`` included, as ``MegatronBackend.export`` does."""
        self.schedule.gather_parameters()
        parameters = [named_weights(chunk.module) for chunk in self.chunks]
        yield from export_weights(parameters, self.shape, self.topology, bucket_bytes=bucket_bytes)

    def save_hugging_face(self, path: pathlib.Path | RemotePath, tokenizer) -> None:
        """Write a directory that ``AutoModelForSequenceClassification`` loads; each rank writes its own files."""
        self.schedule.gather_parameters()
        chunks = [named_weights(chunk.module) for chunk in self.chunks]
        save_hugging_face(
            Parameters(chunks=chunks, shape=self.shape, topology=self.topology),
            classifier_config(self.hf_config, tokenizer),
            tokenizer,
            path,
            source=self.config.model.hf_path,
            tokenizer_source=self.config.model.tokenizer_path,
        )

    def close(self, *, leave_world: bool = True) -> None:
        """Destroy all process groups; the process may build another model afterwards.

        leave_world: whether the default process group is destroyed too.
        """
        self.retire()
        topology.destroy(leave_world=leave_world)


def classifier_config(hf_config, tokenizer):
    """Return transformers' config of a sequence classifier with one label over the same model.

    Such a classifier reads a sequence's score at its last token that is not a pad. So the pad must
    not be the token that ends a response. If the tokenizer has no other pad, ``pad_token_id`` is
    null, and transformers scores one sequence at a time.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSES

    classifier = copy.deepcopy(hf_config)
    classifier.architectures = [CLASSES[hf_config.model_type]]
    classifier.num_labels = 1
    pads = [pad for pad in (hf_config.pad_token_id, tokenizer.pad_token_id) if isinstance(pad, int) and pad >= 0]
    classifier.pad_token_id = next((pad for pad in pads if pad != tokenizer.eos_token_id), None)
    if classifier.pad_token_id is None:
        log.warning(
            "the reward model's tokenizer has no pad token beside the end of sequence: config.json has "
            "pad_token_id=null, and transformers scores one row at a time"
        )
    return classifier
