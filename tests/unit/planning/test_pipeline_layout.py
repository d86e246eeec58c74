"""The layers of each pipeline stage: balanced as brute force finds it, stated in Megatron-Core's own notation."""

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as some

from megatron_rl.config import load_config
from megatron_rl.distributed import platform  # noqa: F401  (before megatron.core)
from megatron_rl.errors import ConfigError
from megatron_rl.planning.pipeline_layout import balanced, notation, stage_layers, stated_layers

from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout  # isort: skip
from megatron.core.transformer.enums import LayerType  # isort: skip


def measure(costs: list[int], head: int, counts: tuple[int, ...], pipeline: int) -> tuple[int, int, int, tuple]:
    """Return the slowest rank's cost, the costliest stage's, the sum of squares, and the counts: less is better."""
    parts = iter(costs)
    stages = [sum(itertools.islice(parts, count)) for count in counts]
    stages[-1] += head
    ranks = [sum(stages[rank::pipeline]) for rank in range(pipeline)]
    return max(ranks), max(stages), sum(x * x for x in stages), counts


def every(layers: int, stages: int) -> list[tuple[int, ...]]:
    cuts = itertools.combinations(range(1, layers), stages - 1)
    return [tuple(b - a for a, b in itertools.pairwise((0, *cut, layers))) for cut in cuts]


@settings(max_examples=150, deadline=None)
@given(some.data())
def test_no_other_layout_balances_better(data: some.DataObject) -> None:
    """Layers of any costs, without chunks: of all layouts the one whose slowest stage is quickest, by brute force."""
    costs = data.draw(some.lists(some.integers(1, 9), min_size=1, max_size=8))
    stages, head = data.draw(some.integers(1, min(5, len(costs)))), data.draw(some.integers(0, 20))
    found = balanced(costs, head, stages)
    layouts = every(len(costs), stages)
    assert measure(costs, head, found, stages) == min(measure(costs, head, x, stages) for x in layouts)


@settings(max_examples=60, deadline=None)
@example((2, 2, 7, 5))
@given(some.tuples(some.integers(2, 3), some.just(2), some.integers(6, 9), some.integers(0, 20)))
def test_chunks_are_balanced_by_rank(sizes: tuple[int, int, int, int]) -> None:
    """Of equal layers: no layout of chunks gives a slowest rank less, and none that gives as little is more even."""
    pipeline, virtual, layers, head = sizes
    costs, stages = [4] * layers, pipeline * virtual
    found = measure(costs, head, balanced(costs, head, pipeline, virtual), pipeline)
    assert found[:2] == min(measure(costs, head, x, pipeline) for x in every(layers, stages))[:2]


@pytest.mark.parametrize(("text", "stages"), [
    ("Et*3|(tt|)*29|L", 32), ("Ettt|tt|,tL", 3), ("E|(t|)*3tL", 5), ("Et*4|(tt|t|)*2L", 6), ("EttL", 1),
])
def test_a_notation_means_what_megatron_core_reads(text: str, stages: int) -> None:
    """DeepSeek-V3's published layout among them, but for its layer that predicts further tokens."""
    degrees = (16, 2) if stages == 32 else (stages, 1)
    settings = zip(("pipeline", "virtual_pipeline", "pipeline_layout"), (*degrees, f"'{text}'"), strict=True)
    config = load_config(None, [f"parallel.{name}={value}" for name, value in settings]).parallel
    rows = PipelineParallelLayerLayout.parse_str_to_list(text)
    counts = stated_layers(config)
    assert counts == tuple(row.count(LayerType.decoder) for row in rows)
    theirs = PipelineParallelLayerLayout(notation(counts), degrees[0])
    theirs.validate_layer_layout(sum(counts), None)
    assert theirs.layout == PipelineParallelLayerLayout(text, degrees[0]).layout


@pytest.mark.parametrize(("layout", "words"), [
    ("[3, 2]", "has 2 stages, and parallel.pipeline=3 x parallel.virtual_pipeline=1 are 3; give as many"),
    ("[3, 2, 3]", "has 8 layers and toy has 7; place each once, or leave the setting out"),
    ("[3, x, 3]", "is no layout; give the layers of each stage"),
    ("[3, -1, 5]", "is no layout; give the layers of each stage"),
    ("[7, 0, 0]", "leaves pipeline rank 1 without a layer"),
    ("tt|tt|ttt", "the first stage begins with E, the last ends with L"),
    ("Ett|tt|tttLt", "the first stage begins with E, the last ends with L"),
    ("ttE|tt|tttL", "the first stage begins with E, the last ends with L"),
    ("Ett|tt|tttm|L", "places a layer that predicts further tokens"),
    ("E(t)*9999|((t|)*999)*99L", "stands for over 10000 characters"),
    ("Et*99999|t|L", "stands for over 10000 characters"),
])
def test_what_is_no_layout_is_refused_by_name(layout: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parallel = load_config(None, ["parallel.pipeline=3", f"parallel.pipeline_layout={layout}"]).parallel
        stage_layers(parallel, [1] * 7, 1, model="toy")
    assert words in str(caught.value) and "parallel.pipeline_layout=" in str(caught.value), caught.value


def test_an_adapted_model_has_a_layer_on_every_stage() -> None:
    from megatron_rl.model.costs import layout_of
    from megatron_rl.model.hf_config import read_shape
    from megatron_rl.model.settings import ModelSettings
    from tests.reference import tiny_config

    hf_config = tiny_config("qwen2_tied", layers=3)
    config = load_config(None, ["parallel.pipeline=2", "parallel.pipeline_layout=E|tttL", "lora.rank=2"])
    with pytest.raises(ConfigError, match="leaves stage 0 without a layer, and lora.rank=2 trains adapters"):
        layout_of(read_shape(hf_config, layer_spec="torch"), ModelSettings.of(config), hf_config)
