"""The layers of each stage of a pipeline: as the user states them, or chosen so that the stages balance.

Stages are counted in the order of the layers: chunk c of pipeline rank r is stage c · PP + r, of PP
· VPP stages. Stage 0 holds the embedding. The last stage holds the final norm and the LM head, as in
Megatron-Core (0.16.1 and 0.19.2 ``transformer/pipeline_parallel_layer_layout.py``).

Invariants (tests/unit/planning/test_pipeline_layout.py):

1. Every layer lies on one stage, in order. A chosen layout leaves no stage without a layer.
2. Without chunks, the slowest stage of the chosen layout costs least (compared with brute force).
   Of layouts with the same slowest cost, the chosen layout has the least sum of squared costs.
3. A text in Megatron-Core's notation means the same as to Megatron-Core's own parser.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from megatron_rl.config.model import ParallelConfig
from megatron_rl.errors import ConfigError, quoted

MOST_CHARACTERS = 10_000  # of a layout whose factors are written out
_KEY = "parallel.pipeline_layout"
_FORMS = (
    "give the layers of each stage, as in [3, 2, 2], or Megatron-Core's notation, as in 'Et*3|(tt|)*2L': E is the "
    "embedding, t a layer, | the end of a stage, L the head"
)


def stated_layers(parallel: ParallelConfig) -> tuple[int, ...]:
    """Return the number of layers of each stage that ``parallel.pipeline_layout`` states; () if it is empty.

    Raises ConfigError for a text that is no layout, for a wrong number of stages, and for a middle
    pipeline rank without a layer.
    """
    # The counts: a list of numbers, or a text in Megatron-Core's notation.
    texts = parallel.pipeline_layout
    if not texts:
        return ()
    words = [word.strip() for word in (texts[0].split(",") if len(texts) == 1 else texts)]
    if all(word.isascii() and word.isdecimal() and len(word) < 6 for word in words):
        counts = tuple(map(int, words))
    elif len(texts) == 1:
        counts = _in_notation(texts[0])
    else:
        raise ConfigError(f"{_KEY}={quoted(list(texts))} is no layout; {_FORMS}")
    # Their number, and a weight on every rank.
    stages = parallel.pipeline * parallel.virtual_pipeline
    if len(counts) != stages:
        raise ConfigError(
            f"{_KEY}={_shown(texts)} has {len(counts)} stages, and parallel.pipeline={parallel.pipeline} x "
            f"parallel.virtual_pipeline={parallel.virtual_pipeline} are {stages}; give as many"
        )
    for rank in range(1, parallel.pipeline - 1):  # the first holds the embedding, the last the head
        if not any(counts[rank :: parallel.pipeline]):
            raise ConfigError(
                f"{_KEY}={_shown(texts)} leaves pipeline rank {rank} without a layer, and so without a weight; give "
                "it one, or lower parallel.pipeline"
            )
    return counts


def _in_notation(text: str) -> tuple[int, ...]:
    """Return the number of layers of each stage of a text in Megatron-Core's notation."""
    stages = _written_out(re.sub(r"[,\s]", "", text)).split("|")
    whole = "".join(stages)
    if "m" in whole:
        raise ConfigError(
            f"{_KEY}={quoted(text)} places a layer that predicts further tokens (m), and none is trained here; leave "
            "the m out (its stage may stay empty, as in 'Et*3|(tt|)*29|L')"
        )
    if not re.fullmatch("Et*L", whole) or not stages[0].startswith("E") or not stages[-1].endswith("L"):
        raise ConfigError(
            f"{_KEY}={quoted(text)} is no layout: the first stage begins with E, the last ends with L, and t alone "
            f"lies between them; {_FORMS}"
        )
    return tuple(stage.count("t") for stage in stages)


def _written_out(text: str) -> str:
    """Return a layout with its factors written out: first (ab)*2 becomes abab, then a*3 becomes aaa."""
    for pattern in (r"\(([^()]+)\)\*(\d{1,4})", r"([Etm|L])\*(\d{1,4})"):
        grown = sum(len(found[1]) * int(found[2]) for found in re.finditer(pattern, text)) + len(text)
        if grown > MOST_CHARACTERS:
            raise ConfigError(f"{_KEY}={quoted(text)} stands for over {MOST_CHARACTERS} characters; give fewer stages")
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
    return text


def _shown(texts: Sequence[str]) -> str:
    return quoted(texts[0]) if len(texts) == 1 else quoted([int(x) if x.isdecimal() else x for x in texts])


def stage_layers(parallel: ParallelConfig, costs: Sequence[int], head: int, *, model: str) -> tuple[int, ...]:
    """Return the number of layers of each stage, as the configuration states it or as ``balanced`` chooses it.

    costs: the cost of each layer, in any unit.
    head: the cost of the LM head, or of another last layer, in the same unit.
    model: its name, for messages.

    Raises ConfigError for a stated layout of another number of layers, and for more stages than
    layers.
    """
    stages = parallel.pipeline * parallel.virtual_pipeline
    if stated := stated_layers(parallel):
        if sum(stated) != len(costs):
            raise ConfigError(
                f"{_KEY}={_shown(parallel.pipeline_layout)} has {sum(stated)} layers and {model} has {len(costs)}; "
                "place each once, or leave the setting out, which balances the stages"
            )
        return stated
    if stages > len(costs):
        raise ConfigError(
            f"parallel.pipeline={parallel.pipeline} x parallel.virtual_pipeline={parallel.virtual_pipeline} are "
            f"{stages} stages and {model} has num_hidden_layers={len(costs)}; lower one of them"
        )
    return balanced(costs, head, parallel.pipeline, parallel.virtual_pipeline)


def balanced(costs: Sequence[int], head: int, pipeline: int, virtual: int = 1) -> tuple[int, ...]:
    """Return the number of layers of each stage, at least 1, such that the slowest pipeline rank costs least.

    Of equally good layouts the most even one is taken. Then the first stages get fewer layers: they
    hold the embedding and the most micro-batches in flight. The chunks of an interleaved schedule
    are balanced one by one first. Then layers move between chunks while that lowers the slowest
    rank's cost.

    costs: the cost of each layer, a whole number of at least 1, so that every rank finds the same.
    head: the cost that the last stage has beside its layers.

    Example: 7 equal layers and a head of 1.5 layers on 3 stages: 2, 3, 2 (costs 2, 3, 3.5).
    """
    sums = list(itertools.accumulate(costs, initial=0))
    counts = _even(sums, head, pipeline * virtual, _least_bound(costs, head, pipeline * virtual))
    if virtual > 1:
        counts = _with_ranks_balanced(sums, head, counts, pipeline)
    return tuple(counts)


def _least_bound(costs: Sequence[int], head: int, stages: int) -> int:
    """Return the cost of the slowest stage in the best layout, by bisection."""
    low, high = max(head + costs[-1], *costs), head + sum(costs)
    while low < high:
        bound = (low + high) // 2
        needed, held = 1, head
        for cost in reversed(costs):
            if held + cost > bound:
                needed, held = needed + 1, 0
            held += cost
        low, high = (low, bound) if needed <= stages else (bound + 1, high)
    return low


def _even(sums: Sequence[int], head: int, stages: int, bound: int) -> list[int]:
    """Return the layers of each stage: stages cost at most ``bound``, and their squared costs have the least sum.

    Of equal layouts, the one whose first stages have fewer layers is taken.

    sums: [layers + 1], the costs of the first layers, summed.
    """
    layers = len(sums) - 1
    # least[k][i]: the least sum of squared costs for layers i … on the last k stages
    least: list[dict[int, int]] = [{layers: 0}]
    for remaining in range(1, stages + 1):
        row: dict[int, int] = {}
        for first in range(layers - remaining, -1, -1):
            for end in range(first + 1, layers + 1):
                cost = sums[end] - sums[first] + (head if remaining == 1 else 0)
                if cost > bound:
                    break
                if end in least[-1]:
                    row[first] = min(cost * cost + least[-1][end], row.get(first, bound * bound * stages + 1))
        least.append(row)
    # From the first stage on, the fewest layers that keep the least sum.
    counts, first = [], 0
    for remaining in range(stages, 0, -1):
        extra = head if remaining == 1 else 0
        ends = (end for end in range(first + 1, layers + 1) if end in least[remaining - 1])
        end = next(
            x for x in ends if (sums[x] - sums[first] + extra) ** 2 + least[remaining - 1][x] == least[remaining][first]
        )
        counts.append(end - first)
        first = end
    return counts


def _with_ranks_balanced(sums: Sequence[int], head: int, counts: list[int], pipeline: int) -> list[int]:
    """Return the counts after moving single layers between chunks as long as ``measure`` falls.

    It compares the slowest rank's cost, then the costliest chunk's, then the sum of squared costs.
    """

    def measure(counts: list[int]) -> tuple[int, int, int, list[int]]:
        ends = list(itertools.accumulate(counts, initial=0))
        chunks = [sums[b] - sums[a] for a, b in itertools.pairwise(ends)]
        chunks[-1] += head
        return max(sum(chunks[r::pipeline]) for r in range(pipeline)), max(chunks), sum(x * x for x in chunks), counts

    best = measure(counts)
    while True:
        moves = (
            [count - (at == source) + (at == target) for at, count in enumerate(best[3])]
            for source in range(len(counts))
            for target in range(len(counts))
            if source != target and best[3][source] > 1
        )
        found = min(map(measure, moves), default=best)
        if found >= best:
            return best[3]
        best = found


def notation(stage_layers: Sequence[int]) -> list[list[str]]:
    """Return a layout in the form of Megatron-Core's ``pipeline_model_parallel_layout``: a list for each stage."""
    stages = [["decoder"] * count for count in stage_layers]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages
