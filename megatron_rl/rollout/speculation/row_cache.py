"""A cache of keys and values in which each row (sample) has its own length, for transformers' models.

A row's token at position p of its sequence is in column p. A forward pass over several tokens of each
row writes their keys and values at the row's own positions. A rejected token's column is hidden from
all queries before it, and the row's next pass overwrites it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from megatron_rl.errors import ConfigError, quoted
from megatron_rl.rollout.engines.grouped_queries import GROUPED
from megatron_rl.weights.families.register import family_of

GROWTH = 1.25  # of the columns, when they are full
FULL, SLIDING = "full_attention", "sliding_attention"


class _Place:
    """Holds where the layers write in the current pass. columns: int64 [R, Q]. width: the columns that they return."""

    def __init__(self) -> None:
        self.columns, self.width = torch.empty(0, 0, dtype=torch.long), 0


class _RowLayer(DynamicLayer):
    """Holds the keys and values of one decoder layer, [R, heads, columns, size]."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, place: _Place) -> None:
        super().__init__()
        self.keys, self.values, self._place = keys, values, place
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the states [R, heads, Q, size] of Q tokens of each row. Return those of all columns in use."""
        index, width = self._place.columns[:, None, :, None], self._place.width
        for kept, states in ((self.keys, key_states), (self.values, value_states)):
            kept.scatter_(2, index.expand_as(states), states)
        return self.keys[:, :, :width], self.values[:, :, :width]


class RowCache(Cache):
    """The cache of a batch of R rows, filled from a pass over their prompts.

    prompts: the cache of the P prompts' pass, padded on the left.
    pads: int64 [P], the pads before each prompt.
    rows: int64 [R], each row's prompt.
    """

    def __init__(self, prompts: DynamicCache, pads: torch.Tensor, rows: torch.Tensor) -> None:
        self._place = _Place()
        layers = []
        for layer in prompts.layers:
            columns = torch.arange(layer.keys.shape[2], device=pads.device)
            index = ((columns + pads[:, None]) % len(columns))[:, None, :, None]
            states = (
                (x.gather(2, index.expand_as(x)) if pads.any() else x).index_select(0, rows)
                for x in (layer.keys, layer.values)
            )
            layers.append(_RowLayer(*states, self._place))
        super().__init__(layers=layers)

    def place(self, columns: torch.Tensor, width: int) -> None:
        """Set where the next pass writes. columns: int64 [R, Q]. width: above all columns."""
        self._place.columns, self._place.width = columns, width
        if width > (now := self.layers[0].keys.shape[2]):
            further = max(width, int(now * GROWTH) + 16) - now
            for layer in self.layers:
                layer.keys, layer.values = (
                    torch.nn.functional.pad(x, (0, 0, 0, further)) for x in (layer.keys, layer.values)
                )

    def keep(self, rows: torch.Tensor) -> None:
        """Hold these rows alone, int64, in their order. One that is named several times is copied."""
        self.reorder_cache(rows)


class Masks:
    """Makes the attention masks of a model's passes over rows of several lengths.

    windows: kind of layer → tokens that a token attends to, itself among them; None for all.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._windows = windows_of(model)
        self._adds = model.config._attn_implementation == "eager"

    def of(self, positions: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor | dict[str, torch.Tensor]:
        """Return the mask [R, 1, Q, width]; by kind of layer, if there are several.

        positions: int64 [R, Q], of the queries.
        dtype: the dtype of the model's activations.
        """
        columns = torch.arange(width, device=positions.device)
        places = positions[:, None, :, None]
        masks = {}
        for kind, window in self._windows.items():
            mask = columns <= places
            if window is not None:
                mask &= columns > places - window
            if self._adds:  # this attention adds the mask to the scores
                mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(
                    ~mask, torch.finfo(dtype).min
                )
            masks[kind] = mask
        return masks if len(masks) > 1 else next(iter(masks.values()))


def windows_of(model: PreTrainedModel) -> dict[str, int | None]:
    """Return for each kind of a model's layers how many tokens a token attends to, None for all.

    Raises ConfigError if its states cannot be cached by row, or if a token's rotary angles depend on the
    batch.
    """
    config = model.config.get_text_config()
    name = quoted(config.model_type)

    def refused(why: str) -> ConfigError:
        return ConfigError(
            f"rollout.speculation=history cannot serve this {name} model with rollout.engine=transformers: {why}; set "
            "rollout.speculation=off"
        )

    windows: dict[str, int | None] = {}
    for layer in DynamicCache(config=model.config).layers:
        if type(layer) is DynamicLayer:
            windows[FULL] = None
        elif type(layer) is DynamicSlidingWindowLayer and not _has_chunks(config):
            windows[SLIDING] = layer.sliding_window
        else:
            raise refused("its layers' states (of delta nets, chunks or indexers) do not go back by some tokens")
    if len(windows) > 1 and family_of(config.model_type) is None:
        raise refused("its layers are of several kinds, and whether it takes a mask for each was not shown")
    if model.config._attn_implementation not in ("sdpa", GROUPED, "eager"):
        raise refused(f"its attention is {quoted(model.config._attn_implementation)}, and sdpa or eager is needed")
    if kinds := _changing_ropes(config.to_dict().get("rope_parameters")):
        raise refused(f"rope_parameters of type {', '.join(kinds)} turn a token by the longest sample of its batch")
    return windows


def _has_chunks(config: PreTrainedConfig) -> bool:
    """Return whether a config has layers that attend within chunks, which have the cache of sliding windows."""
    fields = config.to_dict()
    return "chunked_attention" in (fields.get("layer_types") or ()) or fields.get("attention_chunk_size") is not None


def _changing_ropes(parameters: object) -> Sequence[str]:
    """Return the types of rotary parameters whose angles depend on the batch's longest sample."""
    found = []
    for fields in (parameters, *(parameters.values() if isinstance(parameters, dict) else ())):
        if isinstance(fields, dict) and (kind := str(fields.get("rope_type"))) in ("dynamic", "longrope"):
            found.append(kind)
    return found
