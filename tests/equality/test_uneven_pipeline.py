"""Pipelines whose stages hold different numbers of layers: every number is that of one process."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_rl.config import load_config
from megatron_rl.distributed import platform, topology
from megatron_rl.model import build
from megatron_rl.model.settings import ModelSettings
from megatron_rl.simulator.degrees import degrees_of
from megatron_rl.simulator.memory import stage_parameters
from megatron_rl.weights.config_json import read_hf_config
from tests.equality.layouts import PLAIN, PP2, RECOMPUTE, SHARDED, VPP2
from tests.equality.matrix import BOUND, Cell, measure
from tests.equality.saved_steps import save_and_load
from tests.pairwise import quick
from tests.published.configs import HERE

from megatron.core import parallel_state  # isort: skip
from megatron.core.tensor_parallel import random  # isort: skip

TIED, UNTIED, MIXTURE, LATENTS = "qwen2_tied", "qwen2_untied", "qwen3_moe", "deepseek_v3"
CELLS = [  # pipeline, chunks, layers, model, layout, other settings
    (3, 1, 7, UNTIED, "[]"),
    (2, 2, 7, TIED, "[]"),
    (4, 1, 7, UNTIED, "Et|(ttt|)*2L"),
    (2, 1, 3, MIXTURE, "[1, 2]", "parallel.expert=2"),
    (2, 1, 5, TIED, "[]"),
    (4, 1, 5, TIED, "[]"),
    (2, 1, 7, UNTIED, "[]"),
    (3, 1, 5, TIED, "[]"),
    (4, 1, 7, TIED, "[]"),
    (3, 1, 7, TIED, "3,2,2"),
    (2, 2, 5, UNTIED, "E|tt||tttL"),
    (3, 1, 5, TIED, "[0, 5, 0]"),
    (2, 1, 5, LATENTS, "[]"),
    (2, 1, 5, TIED, "[4, 1]", "parallel.tensor=2", "parallel.sequence_parallel=true"),
]


@pytest.mark.parametrize("cell", quick(CELLS, CELLS[3]))
def test_every_layout_equals_one_process(pool, cell: tuple) -> None:
    """Log-probs, gradient, its norm and the weights after three steps; dense and skip, packed and padded."""
    pipeline, virtual, layers, family, layout, *extra = cell
    degrees = f"pipeline={pipeline}", f"virtual_pipeline={virtual}", f"pipeline_layout={layout}"
    world = pipeline * (2 if extra else 1)
    row = Cell(name="", world=world, layers=layers, extra=tuple(extra), parallel=degrees)
    found = pool.run(world, measure, row, family, timeout_s=120)[0]
    assert len(found) == 10 and max(found.values()) < BOUND, found


SAVED = [  # layers of each stage before and after, other settings
    ("[4, 1]", (PP2, *SHARDED), "[2, 3]", (PP2, *SHARDED)),
    ("[2, 3]", (PP2, *PLAIN), "[2, 1, 1, 1]", (PP2, VPP2, *SHARDED)),
    ("[1, 4]", (PP2, *SHARDED, "lora.rank=3"), "[]", (*SHARDED, "lora.rank=3")),
]


@pytest.mark.parametrize("row", quick(SAVED, *SAVED[1:]))
def test_a_checkpoint_goes_on_under_another_layout(pool, tmp_path, row: tuple) -> None:
    first, settings, second, others = row
    both = (f"parallel.pipeline_layout={first}", *settings), (f"parallel.pipeline_layout={second}", *others)
    for found in pool.run(2, save_and_load, str(tmp_path), *both, TIED, 3, 5, timeout_s=120):
        assert found["loaded"] and found["rate"] and found["reference"] == 0 and found["error"] < BOUND, found


@contextlib.contextmanager
def rank_of(rank: int, world: int, config):
    """Be one rank of a world that is not there: its groups exchange nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    parallel, chunks = config.parallel, config.parallel.virtual_pipeline
    try:
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=parallel.pipeline,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=1,
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
            create_gloo_process_groups=False,
        )
        random.initialize_rng_tracker(inference_rng_tracker=True)
        yield topology.current()
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def released(name: str, stages: tuple[int, ...] | None, *overrides: str) -> list[tuple[int, int, int]]:
    """Return of each stage its layers' numbers, and its parameters, built on the meta device and by the forecast."""
    lengths = "data.max_prompt_tokens=1024", "rollout.max_response_tokens=8192"
    config = load_config(None, ["model.dtype=bfloat16", "model.layer_spec=torch", *RECOMPUTE, *lengths, *overrides])
    hf_config, meta = read_hf_config(HERE / name), torch.device("meta")
    pipeline, expert = config.parallel.pipeline, config.parallel.expert
    degrees, found = degrees_of(config.parallel, pipeline * expert), []
    for stage in stages or range(pipeline):
        with rank_of(stage * expert, pipeline * expert, config) as place:
            angles = build.angles_of(hf_config, build.settled_shape(ModelSettings.of(config), hf_config, place))
            with meta, mock.patch.object(build, "angles_of", lambda *_, angles=angles: angles), \
                    mock.patch.object(type(platform.HOST), "device", meta):
                models, shape = build.build_model(ModelSettings.of(config), hf_config, place)
        layers = [block.layer_number - 1 for model in models for block in model.decoder.layers]
        wanted = [x for chunk in range(stage, shape.num_stages, pipeline) for x in shape.layers_on(chunk)]
        assert layers == wanted, (layers, wanted)
        count = sum(p.numel() for model in models for p in model.parameters())
        found.append((len(layers), count, sum(stage_parameters(shape, degrees, stage))))
    return found


PUBLISHED = "parallel.pipeline_layout='Et*3|(tt|)*29|L'"  # DeepSeek-V3's on 16 stages of 2 chunks, but for its m
RELEASED = [
    ("DeepSeek-V3", 8, 1, (0, 1, 7), [8, 7, 6]),
    ("Qwen3-235B-A22B", 16, 1, (0, 1, 15), [6, 6, 4]),
    ("DeepSeek-V3", 16, 1, None, [4, 3, *[4] * 13, 2]),
    ("DeepSeek-V3", 16, 2, None, [5, *[4] * 13, 2, 2], PUBLISHED),
    ("Qwen3-235B-A22B", 8, 4, None, [12] * 7 + [10]),
]


@pytest.mark.parametrize("row", quick(RELEASED, *RELEASED[:2]))
def test_a_released_model_lies_on_stages_as_the_forecast_says(row: tuple) -> None:
    """At full size on the meta device; both have layers that no number of stages near these divides."""
    name, pipeline, virtual, stages, layers, *more = row
    degrees = f"parallel.pipeline={pipeline}", f"parallel.virtual_pipeline={virtual}", "parallel.expert=32"
    found = released(name, stages, *degrees, *more)
    assert [own for own, *_ in found] == layers
    assert all(built == counted for _, built, counted in found), found
