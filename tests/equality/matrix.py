"""The equality matrix compares every topology with the plain loop of tests/reference.py.

test_matrix.py asserts it, matrix_table.py prints it.

Per cell and model: log-probs and gradient, dense and skip, packed (token cap) and padded (a fixed number of samples,
each padded to the longest); the gradient norm of the first step; and all weights after three AdamW steps of
mini-batches of 4 of 11 samples, dense over padded and skip over packed micro-batches. The matrix is measured with the
distributed optimizer, whose shards of the gradient ``gradient()`` gathers; test_experts.py has the skip run without it.
"""

import functools
from dataclasses import dataclass

import numpy as np
import torch

from tests.equality.layouts import SHARDED
from tests.equality.rig import Rig, open_rig, ragged_advantages
from tests.equality.rows import row
from tests.reference import (
    adamw,
    file_weights,
    make_samples,
    masked_logprobs,
    near_policy,
    reference_gradient,
    relative_error,
    tiny_model,
)

BOUND = 1e-5
NUM_SAMPLES, PER_MINI_BATCH, LR, DECAY, CLIP = 11, 4, 1e-3, 0.1, 0.5
LAYOUTS = {"packed": dict(max_tokens=60), "padded": dict(samples_per_microbatch=2)}
STEPS = (f"train.samples_per_mini_batch={PER_MINI_BATCH}", f"optimizer.lr={LR}", f"optimizer.weight_decay={DECAY}",
         f"optimizer.clip_grad={CLIP}")
DENSE, EXPERTS = ("qwen2_tied", "qwen2_untied"), ("mixtral", "qwen3_moe")
QUANTITIES = ("logprobs", "gradient", "norm", "weights")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A topology: its name, how many processes, the configuration that asks for it, and the models it is tried on."""

    name: str
    world: int
    parallel: tuple[str, ...]
    families: tuple[str, ...] = DENSE
    layers: int = 4
    extra: tuple[str, ...] = ()

    @property
    def overrides(self) -> tuple[str, ...]:
        return (*(f"parallel.{x}" for x in self.parallel), *self.extra)


NAMES = {**{"one": "1 process", "CP2-DP2-gather": "CP2·DP2", "EP2-DP2-gather": "EP2·DP2, overlaps"},
         **{f"{x}2-recompute": f"{x}2, recomputed" for x in ("CP", "EP")},
         "TP2-SP-EP2-ETP1": "TP2·SP·EP2, expert TP 1"}


def cell(layout: str, families: tuple[str, ...] = DENSE, *, layers: int = 4) -> Cell:
    """Return the cell of a layout in the words of rows.py."""
    world, _, settings = row(f"{layout} {families[0]}")
    name = NAMES.get(layout) or layout.replace("-", "·")
    return Cell(name=name, world=world, parallel=(), families=families, layers=layers, extra=settings)


CELLS = (*map(cell, ("one", "TP2", "PP2", "PP2-VPP2", "CP2", "DP2", "TP2-SP")),
         cell("EP2", EXPERTS),
         *map(cell, ("TP2-PP2", "PP2-DP2", "CP2-PP2")),
         cell("EP2-PP2", EXPERTS),
         cell("TP2-CP2"),
         cell("PP4-VPP2", layers=8),
         *map(cell, ("TP2-SP-CP2", "CP2-DP2-gather", "CP4", "CP2-PP2-VPP2")),
         cell("CP2-recompute", ("llama3_rope",)),
         *(cell(x, EXPERTS) for x in ("TP2-SP-EP2-ETP1", "TP2-SP-EP2", "CP2-EP2", "EP2-PP2-VPP2", "EP2-DP2-gather")),
         cell("EP2-recompute", ("qwen3_moe",)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The reference's side of a cell: ``start`` is the model as both sides begin, ``weights`` after the three steps."""

    logprobs: torch.Tensor
    gradient: dict[str, torch.Tensor]
    norms: tuple[float, ...]
    weights: dict[str, torch.Tensor]


@functools.cache
def wanted(family: str, layers: int) -> Wanted:
    """Compute a cell's wanted numbers, sample by sample, with torch's AdamW; a pool's worker keeps them."""
    _, model = tiny_model(family, layers=layers)
    samples = near_policy(model, make_samples(NUM_SAMPLES))
    advantages, groups = list(ragged_advantages(NUM_SAMPLES)), [i // 2 for i in range(NUM_SAMPLES)]
    mask = np.concatenate([s.loss_mask for s in samples])
    logprobs = torch.from_numpy(masked_logprobs(model, samples)[mask])
    gradient, _ = reference_gradient(model, samples, groups, advantages)
    optimizer, norms = adamw(model, LR, DECAY), []
    for start in range(0, NUM_SAMPLES, PER_MINI_BATCH):
        part = slice(start, min(start + PER_MINI_BATCH, NUM_SAMPLES))
        reference_gradient(model, samples[part], groups[part], advantages[part])
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    return Wanted(logprobs=logprobs, gradient=gradient, norms=tuple(norms), weights=file_weights(model))


def take_layout(rig: Rig, layout: str) -> None:
    """Pack the micro-batches under the token cap, or pad every sequence to the longest, so many in each."""
    rules = dict(LAYOUTS[layout])
    if layout == "padded":
        multiple = rig.backend.rules.pad_multiple
        rules["pad_multiple"] = -(-int(rig.batch.facts.total_tokens.max()) // multiple) * multiple
    rig.rules(**rules)


def trained_logprobs(rig: Rig) -> torch.Tensor:
    """Return the log-probs of every loss token of the batch, in order."""
    plan = rig.plan(np.ones(NUM_SAMPLES), drops=False, passes=True)
    flat = torch.from_numpy(rig.backend.forward(rig.batch, plan).flat)
    return flat[torch.from_numpy(rig.loss_mask)]


def one_step(rig: Rig, want: Wanted | None, found: dict[str, float]) -> None:
    """Measure log-probs and gradients of one layout after the other, dense and skip."""
    advantages = ragged_advantages(NUM_SAMPLES)
    for layout in LAYOUTS:
        take_layout(rig, layout)
        logprobs = trained_logprobs(rig)
        if rig.is_main:
            found[f"logprobs {layout}"] = relative_error({"": logprobs}, {"": want.logprobs})
        for drops in (False, True):
            gradient = rig.gradient(advantages, rig.plan(advantages, drops=drops))
            if rig.is_main:
                found[f"gradient {layout} {'skip' if drops else 'dense'}"] = relative_error(gradient, want.gradient)


def three_steps(rig: Rig, want: Wanted | None, found: dict[str, float], *, layout: str, drops: bool) -> None:
    take_layout(rig, layout)
    old = np.concatenate([s.logprobs for s in rig.samples])
    results = rig.step(ragged_advantages(NUM_SAMPLES), drops=drops, old=old)
    weights = rig.weights()
    assert len(results) == 3 and (not drops or sum(r.kind.value == "REAL" for r in results) == 3)
    if rig.is_main:
        kind, wanted_weights = "skip" if drops else "dense", {k: v for k, v in want.weights.items() if k in weights}
        # the first norm: later ones are taken at weights that AdamW has already moved by rounding
        found[f"norm {layout} {kind}"] = abs(results[0].grad_norm / want.norms[0] - 1)
        found[f"weights {layout} {kind}"] = relative_error(weights, wanted_weights)


def measure(rank: int, world: int, cell: Cell, family: str, optimizer: tuple[str, ...] = SHARDED) -> dict[str, float]:
    """Return every error of a cell on the main rank, and {} on the others. optimizer: of all but the dense steps."""
    want = wanted(family, cell.layers) if rank == 0 else None
    found: dict[str, float] = {}
    given = dict(samples=NUM_SAMPLES, layers=cell.layers)
    with open_rig(family, *cell.overrides, *optimizer, **given) as rig:
        one_step(rig, want, found)
    for layout, drops, extra in (("padded", False, SHARDED), ("packed", True, optimizer)):
        with open_rig(family, *cell.overrides, *STEPS, *extra, **given) as rig:
            three_steps(rig, want, found, layout=layout, drops=drops)
    return found if rank == 0 else {}


def worst(found: dict[str, float]) -> dict[str, float]:
    """Return, per quantity, the largest error over layouts and modes."""
    return {q: max(value for key, value in found.items() if key.startswith(q)) for q in QUANTITIES}
