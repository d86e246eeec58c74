"""Adapters against PEFT's own: the naive reference's gradient, and a directory that is written here and read there."""

import json
import math
import pathlib

import pytest
import torch

from tests.adapted import PROJECTIONS, adapt, adapters_of
from tests.equality.rig import open_rig, ragged_advantages
from tests.pairwise import pairwise
from tests.reference import file_weights, make_samples, near_policy, reference_gradient, relative_error, tiny_model
from tests.workers.pool import Pool

peft = pytest.importorskip("peft")

RANK, ALPHA, COUNT = 3, 5.0, 6
ALL = tuple(name for names in PROJECTIONS.values() for name in names)
FAMILIES, MIXTURES = ("qwen2_tied", "qwen3", "llama"), ("qwen3_moe", "mixtral")


def peft_model(family: str):
    """Return (PEFT's model around the tiny one, its adapters by the names that are used here)."""
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(ALL), task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(tiny_model(family)[1], config)
    return wrapped, {plain(name): p for name, p in wrapped.named_parameters() if p.requires_grad}


def plain(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".default.", ".")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_naive_references_gradient_is_pefts(family: str) -> None:
    """It is float32 in another order: PEFT multiplies by alpha / rank last, too."""
    _, ours = tiny_model(family)
    adapt(ours, rank=RANK, alpha=ALPHA)
    theirs, named = peft_model(family)
    assert set(named) == set(adapters_of(ours))
    with torch.no_grad():
        for name, tensor in adapters_of(ours).items():
            named[name].copy_(tensor)
    samples = near_policy(ours, make_samples(COUNT))
    groups, advantages = [i // 2 for i in range(COUNT)], list(ragged_advantages(COUNT))
    want, _ = reference_gradient(theirs, samples, groups, advantages)
    found, _ = reference_gradient(ours, samples, groups, advantages)
    assert relative_error(found, {plain(name): x for name, x in want.items()}) < 1e-6


def write(rank: int, world: int, folder: str, family: str, overrides: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Take three steps of adapters, write both exports, and return the merged one."""
    lora = (f"lora.rank={RANK}", f"lora.alpha={ALPHA}", "optimizer.lr=0.01")
    with open_rig(family, *lora, *overrides, samples=8) as rig:
        untrained = {name: x.clone() for name, x in rig.backend.export_adapters()}
        for _ in range(3):
            rig.step(ragged_advantages(8), drops=True)
        rig.backend.save_adapters(pathlib.Path(folder))
        return rig.weights() | untrained


TP2, PP2, EP2 = ("parallel.tensor=2",), ("parallel.pipeline=2",), ("parallel.expert=2",)
CASES = [*pairwise(FAMILIES, ((), TP2, PP2), strength=1), *pairwise(MIXTURES, ((), EP2, PP2), strength=1)]


@pytest.mark.parametrize("family, overrides", CASES)
def test_peft_reads_our_directory_and_merges_it_to_our_export(pool: Pool, tmp_path, family, overrides) -> None:
    """PEFT stacks the pairs of experts itself. Untrained adapters are drawn as its own: within ±1/√in, B zero."""
    found = pool.run(2, write, str(tmp_path / "adapter"), family, overrides, timeout_s=90)[0]
    _, model = tiny_model(family)
    read = peft.PeftModel.from_pretrained(model, tmp_path / "adapter")
    targets = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["target_modules"]
    assert targets == list((*ALL[:4], "w1", "w3", "w2") if family == "mixtral" else ALL)
    for name, tensor in found.items():
        if ".lora_B." in name:
            assert not tensor.any()
        elif ".lora_A." in name:
            bound = 1 / math.sqrt(tensor.shape[1])
            assert tensor.abs().max() <= bound and abs(float(tensor.std()) / (bound / math.sqrt(3)) - 1) < 0.2
    wanted = file_weights(read.merge_and_unload())
    exported = {name: x for name, x in found.items() if ".lora_" not in name}
    assert relative_error(exported, {name: wanted[name] for name in exported}) < 1e-6
    before = file_weights(tiny_model(family)[1])
    assert relative_error(exported, {name: before[name] for name in exported}) > 1e-3, "three steps moved something"
