"""Routing replay: a mixture's routers use the experts that the rollout engine or the old policy chose.

Megatron-Core's router (0.16.1 and 0.19.2, ``transformer/moe/router.py``, TopKRouter.routing) asks
the object at its attribute ``router_replay`` for top-k scores and experts. The router then treats
them as its own choice: softmax, sigmoid or pre-softmax, normalisation and scaling
(``transformer/moe/moe_utils.py``, topk_routing_with_score_function).

This module sets such an object on each router of a rank. The object returns the replayed experts
and the router's own scores of these experts. So the gradient reaches the router through the gate
weights as usual. The choice of experts, which has no gradient, is fixed.

Method: Rollout Routing Replay (arXiv:2510.11370). For replay of the old policy's choice:
arXiv:2507.18071, section 5.3.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_rl.distributed import platform  # noqa: F401  (before megatron.core)
from megatron_rl.distributed.platform import HOST
from megatron_rl.errors import ConfigError
from megatron_rl.weights.model_shape import ModelShape

import megatron.core  # isort: skip
from megatron.core.transformer.moe.router import TopKRouter  # isort: skip

# Fields of Megatron-Core's TransformerConfig that can keep a router from taking replayed experts:
# the values that are allowed, and the reason against others.
REFUSED_FIELDS: dict[str, tuple[tuple[object, ...], str]] = {
    "moe_router_fusion": ((False, None), "the fused kernel chooses experts itself"),
    "moe_expert_capacity_factor": ((None,), "it drops tokens of the experts that would be replayed"),
}


def check_routing_replay(replayed: str, transformer: Mapping[str, object], shape: ModelShape) -> None:
    """Raise ConfigError if the model, or a field of Megatron-Core's TransformerConfig, does not allow routing replay.

    replayed: ``rollout.routing_replay``, which says whose choice of experts is replayed.
    transformer: the user's ``megatron.transformer`` fields.
    """
    setting = f"rollout.routing_replay={replayed}"
    if not shape.num_experts:
        raise ConfigError(
            f"{setting} replays the experts of a mixture, and the model of model.hf_path has none; set "
            "rollout.routing_replay=off"
        )
    if shape.chunked is not None and replayed == "rollout":
        raise ConfigError(
            f"{setting} needs the experts that the engine's routers chose, and transformers' router of {shape.family} "
            "(5.19 Llama4Router) returns only scores; set rollout.routing_replay=off"
        )
    for name, (harmless, reason) in REFUSED_FIELDS.items():
        value = transformer.get(name, harmless[0])
        if value not in harmless:
            raise ConfigError(
                f"megatron.transformer.{name}={value} with {setting}: {reason}; remove it, or set "
                "rollout.routing_replay=off"
            )


Recording = dict[int, tuple[Any, dict[int, torch.Tensor]]]
"""Maps ``id(microbatch)`` to (micro-batch, {index in ``RoutingReplay.layers``: experts, int64 [rows, top_k]})."""


@dataclass(slots=True, kw_only=True, eq=False)
class _RouterSeam:
    """Gives one router its replayed experts; it is the object in the router's attribute ``router_replay``.

    index: the router's index among the routers of this rank.
    experts: int16 [tokens, top_k], the experts of the micro-batch in its forward pass; None leaves
        the choice to the router.
    waiting: oldest first, the experts of each micro-batch whose backward pass is still to come. A
        recomputed forward pass takes its experts from here.
    is_open: whether a forward pass is running; a call at another time comes from recomputation.
    counts: int64 [2]: how many replayed tokens the router would have sent to other experts, and how
        many tokens were replayed. None if nothing is counted.
    recorded: receives the router's own choice for the running micro-batch, under ``index``. None if
        nothing is recorded.
    """

    index: int
    experts: torch.Tensor | None = None
    waiting: deque[torch.Tensor | None] = field(default_factory=deque)
    is_open: bool = False
    counts: torch.Tensor | None = None
    recorded: dict[int, torch.Tensor] | None = None

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores and the indices of the experts that the router is to use, [tokens, topk] each.

        Megatron-Core's router calls this method by this name, with these arguments.
        """
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        experts = self._experts()
        if self.is_open and self.recorded is not None:
            self.recorded[self.index] = own
        if experts is None:
            return values, own
        if experts.shape != own.shape:
            raise RuntimeError(
                f"routing replay holds experts of shape {list(experts.shape)} for a router of {list(own.shape)}"
            )
        known = experts[:, :1] >= 0  # the router chooses for pads, and for tokens whose experts are not known
        chosen = torch.where(known, experts.to(own.dtype), own)
        if self.is_open and self.counts is not None:
            elsewhere = (chosen.sort(dim=1).values != own.sort(dim=1).values).any(dim=1)
            self.counts += torch.stack([elsewhere.sum(), known.sum()])
        return scores.gather(1, chosen), chosen

    def _experts(self) -> torch.Tensor | None:
        """Return the replayed experts of the micro-batch of this call; None leaves the choice to the router.

        In recomputation a call takes the oldest of ``waiting``, the micro-batches whose backward pass
        is still to come. It is the right one: every schedule runs a chunk's backward passes in the
        order of its forward passes.
        """
        if self.is_open:
            self.waiting.append(self.experts)
            return self.experts
        return self.waiting.popleft() if self.waiting else None


class RoutingReplay:
    """Gives the routers of this rank's chunks each micro-batch's replayed experts.

    layers: the number of each router's layer in the whole model, from 0, chunk by chunk.
    counts: int64 [2] on the device: how many replayed tokens a router would have sent to other
        experts, and how many were replayed. They are added up over layers, and over calls of
        ``forward`` with ``counts=True``.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Give every router of the chunks an object from which it takes replayed experts.

        Raises ConfigError if Megatron-Core's routers take no such object.
        """
        self._seams: list[list[_RouterSeam]] = []
        layers: list[int] = []
        for chunk in chunks:
            seams = []
            for router in (module for module in chunk.modules() if isinstance(module, TopKRouter)):
                if not hasattr(router, "router_replay"):
                    raise ConfigError(
                        f"rollout.routing_replay needs a router that takes experts, and Megatron-Core "
                        f"{megatron.core.__version__} has none; install 0.16.1 or newer, or set "
                        "rollout.routing_replay=off"
                    )
                router.router_replay = _RouterSeam(index=len(layers))
                seams.append(router.router_replay)
                layers.append(router.layer_number - 1)
            self._seams.append(seams)
        self.layers = tuple(layers)
        self.counts = torch.zeros(2, dtype=torch.int64, device=HOST.device)
        self._recorded: Recording | None = None

    @contextlib.contextmanager
    def forward(self, chunk: int, microbatch: Any, experts: torch.Tensor | None, *, counts: bool) -> Iterator[None]:
        """Make the routers of chunk number ``chunk`` use a micro-batch's experts within the ``with`` block.

        microbatch: any object that identifies the micro-batch, the same for all chunks.
        experts: int16 [layers of this rank, tokens, top_k]. −1 leaves a token's choice to the router.
            None leaves all choices to the routers.
        counts: whether the forward pass adds to ``self.counts``.
        """
        recorded = None
        if self._recorded is not None:
            recorded = self._recorded.setdefault(id(microbatch), (microbatch, {}))[1]
        for seam in self._seams[chunk]:
            seam.is_open, seam.experts = True, None if experts is None else experts[seam.index]
            seam.counts, seam.recorded = self.counts if counts else None, recorded
        try:
            yield
        finally:
            for seam in self._seams[chunk]:
                seam.is_open, seam.experts, seam.recorded = False, None, None

    def forget(self) -> None:
        """Discard the experts kept for recomputation; call it when a run of the pipeline schedule ends."""
        for seams in self._seams:
            for seam in seams:
                seam.waiting.clear()

    @contextlib.contextmanager
    def recording(self) -> Iterator[Recording]:
        """Yield a ``Recording``, a dict that receives the routers' own choices of experts within the ``with`` block.

        Its keys are Python's ``id(microbatch)``. Its values are (micro-batch, {index in ``layers``:
        experts, int64 [tokens, top_k]}); the micro-batch is held so that its id stays unique.
        """
        self._recorded = {}
        try:
            yield self._recorded
        finally:
            self._recorded = None
