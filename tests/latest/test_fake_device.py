"""Every kind of stage on a CUDA build of torch without a GPU: right devices, and no question beyond the known ones.

fake_passes.py runs the micro-batch loop, forward and backward, on tensors that have a device and no numbers
(FakeTensorMode). A tensor on the host among those of the device raises, and so does each number that the host reads. A
wait that raises nothing, such as a blocking copy, is counted by place. Not covered: the optimizer's step, the ends of
a pass after its last micro-batch, Transformer Engine, kernels' own requirements, what a stream would reorder.
"""

import importlib.metadata
import json
import re
import sys

import pytest
import torch

from megatron_rl.config import load_config
from megatron_rl.model.hf_config import model_shape
from megatron_rl.model.settings import ModelSettings
from megatron_rl.simulator.degrees import degrees_of
from megatron_rl.simulator.memory import kept_elements
from megatron_rl.simulator.placed import PlacedModel
from tests.latest.cases import CASES, KEPT, LENGTHS, MISTAKES
from tests.patience import patient
from tests.reference import tiny_config
from tests.runs.command import ROOT, said_by

MEGATRON = tuple(int(part) for part in importlib.metadata.version("megatron-core").split(".")[:2])
pytestmark = [pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of torch (and no GPU)"),
              pytest.mark.skipif(MEGATRON < (0, 19), reason="the known questions are those of megatron-core 0.19"),
              pytest.mark.long(seconds=60)]


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> dict[str, dict]:
    """Run all cases in one process; return what it told of each pass."""
    results = tmp_path_factory.mktemp("fake_device") / "results.jsonl"
    passes = [sys.executable, "-m", "tests.latest.fake_passes", str(results)]
    said_by(passes, ROOT, patient(600), CUDA_VISIBLE_DEVICES="")
    return dict(json.loads(line) for line in results.read_text().splitlines())


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_is_on_the_device(told, name: str) -> None:
    for purpose, found in told[name].items():
        assert found["error"] is None, f"{purpose}: {found['error']}"
        assert found["devices"] and {place.partition(" on ")[2] for place in found["devices"]} == {"cuda:0"}, purpose
        has_loss = any(place.startswith("loss") for place in found["devices"])
        assert has_loss == (name not in ("embedding", "middle")), purpose
        has_gradient = any(place.startswith("gradient") for place in found["devices"])
        assert has_gradient == (purpose not in ("logprob", "values")), purpose


@pytest.mark.parametrize("name", CASES)
def test_host_asks_the_device_at_known_places_alone(told, name: str) -> None:
    assert {purpose: found["questions"] for purpose, found in told[name].items()} == CASES[name].questions


@pytest.mark.parametrize("family", KEPT)
def test_activations_are_what_autograd_saves_under_fused_kernels(told, family: str) -> None:
    """In bfloat16 on a GPU a layer's are within 5 % of the forecast, which leaves out a number per token and head."""
    deep, shallow = (told[f"{family}, {layers} layers"]["train"]["kept_bytes"] for layers in (4, 2))
    config = load_config(None, ["model.dtype=bfloat16"])
    degrees = degrees_of(config.parallel, 1)
    shape = model_shape(tiny_config(family), ModelSettings.of(config), degrees, layer_spec="torch")
    tokens = sum(length - 1 for length in LENGTHS)  # no sample's last token runs
    kept = kept_elements(PlacedModel.of(config, shape, degrees), 1)
    assert 2 * tokens * kept == pytest.approx((deep - shallow) / 2, rel=0.05)


@pytest.mark.parametrize("family", KEPT)
def test_layer_launches_the_kernels_that_are_known(told, family: str) -> None:
    """The host launches them one by one, and is the bound of short micro-batches: one more is a finding."""
    deep, shallow = (told[f"{family}, {layers} layers"]["logprob"]["launches"] for layers in (4, 2))
    assert (deep - shallow) / 2 == KEPT[family]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistake_shows(told, mistake: str) -> None:
    found = told[f"with {mistake}"]["train"]
    shown = f"{found['error']} {list(found['questions'])}"
    assert re.search(MISTAKES[mistake], shown), shown
