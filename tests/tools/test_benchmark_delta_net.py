"""Checks tools/benchmarks/delta_net.py in small: equal outputs, all figures, and the forecast's kept bytes."""

import json
import pathlib

import delta_net as tool
import pytest
import torch

from megatron_rl.simulator.memory import delta_kept_elements
from megatron_rl.weights.model_shape import DeltaNetShape
from tests.tools import words

SIZES = "--hidden 32 --key-heads 2 --value-heads 4 --head-dim 32"


def figures(rank: int, world: int, path: str) -> int:
    """Write the figures of a small run to ``path``; return the bytes kept of one segment of 32 whole chunks."""
    assert tool.main(words(f"{SIZES} --segments 3 --tokens 5 70 --repeats 1 --json {path}")) == 0
    ways = tool.ways(tool.parse(words(SIZES)), [2048])
    return tool.kept_bytes(ways[tool.WAYS[0]], torch.randn(2048, 32, requires_grad=True))


def test_ratios_are_those_of_equal_outputs_and_kept_bytes_the_forecast_s(pool, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "delta.json"
    (kept,) = pool.run(1, figures, str(path), timeout_s=60)
    found = json.loads(path.read_text())
    assert found["difference"] < 1e-5 < 1e-3 < found["largest_output"]
    first, *others = found["rows"]
    for row in others:
        assert row["times_as_fast"] == row["seconds"] / first["seconds"]
        assert row["times_kept"] == row["kept_bytes_per_token"] / first["kept_bytes_per_token"]
    shape = DeltaNetShape(layers=(0,), key_heads=2, value_heads=4, key_head_dim=32, value_head_dim=32, conv_tokens=4)
    assert 4 * 2048 * delta_kept_elements(shape) == pytest.approx(kept, rel=0.03)
