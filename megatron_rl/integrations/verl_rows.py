"""The choice of the rows of verl's training batch that run, and the settings under which every row must run.

In verl's terms a row is a sample, and a mini-batch is trained by one optimizer step. Every
data-parallel rank holds its own rows. Nothing here imports verl or calls a collective.

Invariants:

1. Only a row whose every advantage × mask is 0 is left out or used as a filler (see 3); NaN and
   infinity are not 0.
2. All data-parallel ranks run the same number of micro-batches.
3. A filler is a row of weight zero of its own rank: the shortest one, repeated as often as needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_rl.algorithm.signal import COUPLING_FIELDS, UNCOUNTED_FIELDS

# verl's policy losses (0.9.1, trainer/ppo/core_algos.py) in which a token's term is a multiple of its own row's
# advantage, and agg_loss divides by the counts of the mini-batch. Not among them: dro trains at A = 0; clip_cov and
# kl_cov choose tokens among all rows of a micro-batch; geo_mean averages over a micro-batch's rows; bypass_mode makes
# its own masks and weights from the rows.
EXACT_LOSS_MODES = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "cispo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Holds what decides which of one rank's rows (samples) run.

    lengths: the number of tokens of each row.
    has_signal: whether each row has a token with advantage × mask other than 0.
    loss_tokens: the number of loss tokens of all rows together.

    Example: two rows of 7 and 5 tokens have ``lengths=(7, 5)``.
    """

    lengths: tuple[int, ...]
    has_signal: tuple[bool, ...]
    loss_tokens: int

    @property
    def kept(self) -> list[int]:
        return [row for row, kept in enumerate(self.has_signal) if kept]

    def with_fillers(self, num_rows: int) -> list[int] | None:
        """Return the indices of the rows with signal, then fillers until there are ``num_rows`` indices.

        Every filler is the shortest row without signal. Returns None if fillers are needed and every
        row has signal.
        """
        rows_kept = self.kept
        missing = num_rows - len(rows_kept)
        if missing <= 0:
            return rows_kept
        dropped = [row for row, has in enumerate(self.has_signal) if not has]
        return rows_kept + [min(dropped, key=self.lengths.__getitem__)] * missing if dropped else None

    def tokens(self, rows: Sequence[int]) -> int:
        return sum(self.lengths[row] for row in rows)


def rows_of(batch: Mapping[str, torch.Tensor]) -> Rows:
    """Return the row lengths, signal and loss tokens of one rank's batch.

    batch: verl's batch with ``input_ids`` [S, j] jagged, and with ``advantages``, ``response_mask``
        and ``loss_mask``, padded [S, T] or jagged. verl counts loss tokens by ``loss_mask``.
    """
    advantages, mask, counted = (batch[key] for key in ("advantages", "response_mask", "loss_mask"))
    moving = _padded(advantages) * _padded(mask).to(advantages.dtype) != 0
    return Rows(
        lengths=tuple(batch["input_ids"].offsets().diff().tolist()),
        has_signal=tuple(moving.any(-1).tolist()),
        loss_tokens=int((counted.values() if counted.is_nested else counted).sum()),
    )


def _padded(values: torch.Tensor) -> torch.Tensor:
    return values.to_padded_tensor(0) if values.is_nested else values


def loss_obstacles(loss_function: Callable, own_loss: Callable, batch: Any, policy_loss: Callable) -> list[str]:
    """Return the settings of the loss, each as ``key=value``, under which a row must run even at advantage 0.

    loss_function: the loss of this mini-batch.
    own_loss: verl's function ``ppo_loss``.
    batch: verl's TensorDict.
    policy_loss: verl's function that takes the name of a loss mode and returns its loss function.
    """
    if not isinstance(loss_function, functools.partial) or loss_function.func is not own_loss:
        return [f"the loss function {loss_function!r:.80} (only verl's ppo_loss is known)"]
    config, obstacles = loss_function.keywords["config"], []
    mode = config.policy_loss.get("loss_mode", "vanilla")
    if mode not in EXACT_LOSS_MODES or policy_loss(mode).__module__ != policy_loss.__module__:
        obstacles.append(f"actor.policy_loss.loss_mode={mode}")
    if config.use_kl_loss and config.kl_loss_coef != 0:
        obstacles.append(f"actor.kl_loss_coef={config.kl_loss_coef}")
    if config.entropy_coeff != 0:
        obstacles.append(f"actor.entropy_coeff={config.entropy_coeff}")
    by_rows = config.loss_agg_mode.startswith("seq-") or mode == "sapo"
    if by_rows and ("global_batch_size" not in batch or batch["global_batch_size"] is None):
        obstacles.append("no global_batch_size (a mean over a micro-batch's own rows)")
    norm = config.loss_agg_mode == "seq-mean-token-sum-norm" and config.loss_scale_factor is None
    if norm and batch["response_mask"].is_nested:
        obstacles.append("actor.loss_scale_factor=null (the longest response of a micro-batch)")
    return obstacles


def model_obstacles(transformer: Mapping[str, Any]) -> list[str]:
    """Return the TransformerConfig fields that ``skip.mode=exact`` refuses, each as ``key=value``; [] if none.

    transformer: {field: value}.
    """
    obstacles = [
        f"{field}={transformer[field]}"
        for field, harmless in COUPLING_FIELDS.items()
        if field in transformer and not _among(transformer[field], harmless)
    ]
    for field in UNCOUNTED_FIELDS:
        value = transformer.get(field)
        if any(value) if isinstance(value, list | tuple) else value:
            obstacles.append(f"{field}={value}")
    return obstacles


def _among(value: Any, harmless: tuple) -> bool:
    return all(each in harmless for each in value) if isinstance(value, list | tuple) else value in harmless


def round_up(number: int, multiple: int) -> int:
    """Return the least multiple of ``multiple`` that is ≥ ``number``. Example: (5, 4) → 8."""
    return -(-number // multiple) * multiple
