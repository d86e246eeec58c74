"""Exports on a real S3 server: each rank uploads its own objects, and a folder without config.json is none."""

import json

import pytest
import torch
from safetensors.torch import load

from megatron_rl.storage.location import location
from megatron_rl.weights.file_plan import FileSizes
from tests.equality.layouts import PP2, TP2
from tests.equality.rig import any_tokenizer, open_rig

LIMITS = FileSizes(most_bytes=60_000, least_bytes=1)


def export_to(rank: int, world: int, url: str, overrides: tuple[str, ...], fails: bool) -> dict:
    """Export to a store; with ``fails`` expect the error that it gives. Return the whole weights, or the error."""
    with open_rig("qwen3", *overrides, layers=4) as rig:
        if not fails:
            rig.backend.save_hugging_face(location(url), any_tokenizer(), limits=LIMITS)
            return {name: x.clone() for name, x in rig.backend.export()}
        with pytest.raises((OSError, RuntimeError)) as raised:
            rig.backend.save_hugging_face(location(url, answer_s=20.0), any_tokenizer(), limits=LIMITS)
        return {"error": str(raised.value)}


@pytest.mark.parametrize(("world", "overrides"), [(2, (TP2,)), (2, (PP2,)), (1, ("lora.rank=2",))], ids=str)
def test_all_ranks_write_one_export(pool, door, tmp_path, world, overrides):
    url = f"s3://bucket/{tmp_path.name}/step_3/hf"
    wanted = pool.run(world, export_to, url, overrides, False, timeout_s=120)[0]
    place, found = location(url), {}
    for name in set(json.loads((place / "model.safetensors.index.json").read_text())["weight_map"].values()):
        found |= load((place / name).read_bytes())
    assert found.keys() == wanted.keys() and all(torch.equal(found[k], v) for k, v in wanted.items())
    assert json.loads((place / "config.json").read_text())["model_type"] == "qwen3"
    assert not (place / ".written-by-all").exists()
    adapters = location(f"{url}_adapter").files()
    assert ("adapter_config.json" in adapters) == ("lora.rank=2" in overrides)


def test_a_store_that_refuses_one_file_is_left_without_an_export(pool, door, tmp_path):
    """The rank whose object is refused says so, the other one is told, and the objects that were written are gone."""
    url = f"s3://bucket/{tmp_path.name}/step_3/hf"
    door.busy, door.times = b"model-00003-of", 10**6
    said = pool.run(2, export_to, url, (TP2,), True, timeout_s=240)
    door.open()
    assert all("error" in each for each in said), said
    assert not location(url).files()
