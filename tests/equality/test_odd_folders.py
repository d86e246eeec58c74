"""A wrong model is never loaded: its log-probs are transformers', or the folder is refused by name."""

import contextlib
import json
import pathlib
import re

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.backend import MegatronBackend
from megatron_rl.distributed import topology
from megatron_rl.errors import ConfigError
from tests.equality.odd_folders import FOLDERS, SINGLE, Folder, write
from tests.equality.rig import Rig, config_of
from tests.reference import make_samples, masked_logprobs

# Two implementations of a forward pass in float32, as in test_weights.py: seen 2e-6.
TOLERANCE = 1e-4


def logprobs_or_refusals(rank: int, world: int, folders: dict[str, tuple[str, tuple[str, ...]]]) -> dict[str, object]:
    """Return, for each folder, the log-probs of its model, or the message of the ConfigError."""
    found = {}
    for name, (path, overrides) in folders.items():
        with contextlib.ExitStack() as held:
            held.callback(topology.destroy)
            try:
                backend = MegatronBackend(config_of(f"model.hf_path={path}", *overrides))
            except ConfigError as error:
                found[name] = str(error)
                continue
            held.pop_all()
            held.callback(backend.close, leave_world=False)
            rig = Rig(backend=backend, model=torch.nn.Identity())
            rig.take(make_samples(4))
            found[name] = rig.logprobs()
    return found


def transformers_logprobs(path: pathlib.Path) -> np.ndarray:
    """Return transformers' log-probs of a folder; its FP8 loader needs accelerate, so blocks are taken away here."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    settings = json.loads((path / "config.json").read_text())
    if settings.pop("quantization_config", None):
        held = load_file(path / SINGLE)
        for scale in [name for name in held if name.endswith("_scale_inv")]:
            weight = scale.removesuffix("_scale_inv")
            held[weight] = Fp8Dequantize(None)._dequantize_one(held[weight], held.pop(scale), torch.float32)
        path = path.with_name(f"{path.name}-full")
        path.mkdir()
        (path / "config.json").write_text(json.dumps(settings))
        save_file(held, path / SINGLE, metadata={"format": "pt"})
    return masked_logprobs(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), make_samples(4))


def test_a_folder_gives_transformers_model_or_is_refused_by_name(pool, tmp_path):
    places: dict[str, pathlib.Path] = {}
    for number, (name, folder) in enumerate(FOLDERS.items()):
        places[name] = tmp_path / str(number)
        write(places[name], folder.family, shards=folder.shards)
        folder.change(places[name])
    given = {name: (str(path), FOLDERS[name].overrides) for name, path in places.items()}
    (found,) = pool.run(1, logprobs_or_refusals, given, timeout_s=120)
    wrong = [fault for name, folder in FOLDERS.items() if (fault := _fault(folder, places[name], found[name]))]
    assert not wrong, "\n".join(wrong)


def _fault(folder: Folder, path: pathlib.Path, found: object) -> str | None:
    """Return the sentence for an outcome that is not the folder's; None where it is."""
    if isinstance(found, str):
        if folder.refusal is None or not re.search(folder.refusal, found):
            return f"wanted {folder.refusal or 'a model'}: {found}"
        return None if len(found) < 700 else f"{len(found)} characters: {found}"
    if folder.refusal is not None:
        return f"loaded, and wanted {folder.refusal}"
    gap = float(np.abs(found - transformers_logprobs(path)).max())
    print(f"{path.name}: {gap:.1e}")
    return None if gap < TOLERANCE else f"{path.name}: log-probs differ by {gap}"
