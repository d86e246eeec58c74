"""The number of layers of each pipeline stage: as the user states it, or chosen so that the slowest rank costs least.

Stages are counted in the order of the layers: chunk c of pipeline rank r is stage c · PP + r, of PP
· VPP stages. Stage 0 holds the embedding. The last stage holds the final norm and the LM head, as in
Megatron-Core (0.16.1 and 0.19.2 ``transformer/pipeline_parallel_layer_layout.py``).

Invariants (tests/unit/planning/test_pipeline_layout.py):

1. Every layer lies on one stage, in order. A chosen layout leaves no stage without a layer.
2. Without interleaved chunks, no other layout has a cheaper slowest stage than the chosen one
   (compared with brute force). Of layouts with equal slowest stages, the chosen one has the least
   sum of squared stage costs.
3. A text in Megatron-Core's notation gives the layout that Megatron-Core's own parser gives.
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
    """Return the number of layers of each stage by ``parallel.pipeline_layout``; () if the setting is empty.

    Raises ConfigError for a text that is no layout and for a wrong number of stages. Raises
    ConfigError also if a pipeline rank between the first and the last has no layer.
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
    """Return the number of layers (t) of each stage, from a text in Megatron-Core's notation.

    Example: ``Et*3|(tt|)*2L`` → (3, 2, 2, 0). E is the embedding, L the output layer with the loss.
    """
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
    """Return a layout text with its repetitions written out: first (ab)*2 becomes abab, then a*3 becomes aaa."""
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

    costs: the cost of each of the model's layers, in any unit.
    head: the cost of the LM head or of the value head on the last stage, in the same unit.
    model: the model's name, for messages.

    Raises ConfigError if a stated layout has another number of layers than the model. Raises
    ConfigError also if there are more stages than layers.
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
    """Return the number of layers of each stage, at least 1, chosen to minimise the cost of the slowest pipeline rank.

    Of equally good layouts, the one with the least sum of squared stage costs is taken. If these are
    equal too, the first stages get fewer layers, since they hold the embedding and the most
    micro-batches in flight. For an interleaved schedule the costs of single chunks are balanced
    first. Then single layers move between chunks as long as that lowers the slowest rank's cost.

    costs: the cost of each layer, an integer of at least 1. Integers make all ranks find the same
        layout.
    head: the cost of the last stage beside its layers.
    pipeline, virtual: the numbers of pipeline ranks and of chunks of each.

    Example: 7 equal layers and a head of 1.5 layers on 3 stages: 2, 3, 2 (costs 2, 3, 3.5).
    """
    sums = list(itertools.accumulate(costs, initial=0))
    counts = _even(sums, head, pipeline * virtual, _least_bound(costs, head, pipeline * virtual))
    if virtual > 1:
        counts = _with_ranks_balanced(sums, head, counts, pipeline)
    return tuple(counts)


def _least_bound(costs: Sequence[int], head: int, stages: int) -> int:
    """Return the least cost that the slowest stage can have in any layout, found by bisection.

    costs, head: as in ``balanced``.
    """
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
    """Return each stage's number of layers, in the layout with the least sum of squared stage costs.

    No stage of the layout costs more than ``bound``. Among equals, the first stages get fewer
    layers.

    sums: [layers + 1]; entry i is the cost of the first i layers together.
    head: the cost of the last stage beside its layers.
    stages: the number of stages.
    bound: the largest cost that a stage may have.
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
    """Return each chunk's number of layers after moving single layers between chunks while the layout improves.

    A layout is better if its slowest rank costs less. If that is equal, the costliest chunk decides,
    then the sum of squared chunk costs.

    sums, head: as in ``_even``.
    counts: each chunk's number of layers before.
    pipeline: the number of pipeline ranks.
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
    """Return a layout as Megatron-Core's ``pipeline_model_parallel_layout``: for each stage the names of its layers.

    Example: stages of 1 and 2 layers → [["embedding", "decoder"], ["decoder", "decoder", "loss"]].
    """
    stages = [["decoder"] * count for count in stage_layers]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages
