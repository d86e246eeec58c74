"""The conversion by NVIDIA's megatron-bridge on a GPU, for model families that `megatron-rl convert` has no tables for.

Our tables (weights/families) map the names and shapes of weights. This module was written from the
source of megatron-bridge 0.3.1 (``models/conversion/auto_bridge.py``: can_handle, import_ckpt,
export_ckpt). We have NOT RUN megatron-bridge: it builds layers of Transformer Engine, which needs a
GPU. The test replaces it by a fake module.
"""

from __future__ import annotations

import argparse
import importlib.util
import pathlib


def family_of(folder: pathlib.Path) -> str | None:
    """Return ``model_type`` of a Hugging Face directory's config.json; None if the file or the field is absent."""
    from megatron_rl.json_text import read_object

    path = folder / "config.json"
    return read_object(path).get("model_type") if path.exists() else None


def needs_bridge(options: argparse.Namespace) -> bool:
    """Return True for an import or export of a model family that our tables lack, if megatron-bridge is installed.

    Our tables are in weights/families.

    options: the parsed command line of `megatron-rl convert`.
    """
    from megatron_rl.weights.families.register import ALIASES, FAMILIES, TEXT_PARTS

    if options.command not in ("import", "export"):
        return False
    family = family_of(options.source if options.command == "import" else options.hf or options.source / "hf")
    built = TEXT_PARTS.get(family, ALIASES.get(family, family)) in FAMILIES
    return family is not None and not built and importlib.util.find_spec("megatron.bridge") is not None


def bridge_command(options: argparse.Namespace) -> tuple[int, dict]:
    """Import or export a model by megatron-bridge; return (exit code 0, report for the user).

    The report is a dict of texts with the keys "wrote", "family" and "by".

    options: the parsed command line of `megatron-rl convert`.

    Raises ConfigError, with the reason and the fix, if megatron-bridge cannot convert the model on
    this host.
    """
    import torch

    from megatron_rl.errors import ConfigError

    hf = options.source if options.command == "import" else options.hf or options.source / "hf"
    family = family_of(hf)
    # Refuse what megatron-bridge cannot do.
    if urls := [str(x) for x in (options.source, options.target, hf) if not isinstance(x, pathlib.Path)]:
        raise ConfigError(f"megatron-bridge, which a {family!r} model needs, reads and writes disks, and not {urls[0]}")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"{hf} holds a {family!r} model, which has no table here; megatron-bridge is installed but builds "
            "Transformer Engine's layers, and there is no GPU; run this on a host with one"
        )
    if options.command == "import" and (options.tp, options.pp, options.ep) != (1, 1, 1):
        raise ConfigError(
            "--tp, --pp and --ep are for our own tables; leave them out: any topology loads what megatron-bridge writes"
        )
    from megatron.bridge import AutoBridge

    if not AutoBridge.can_handle(str(hf)):
        raise ConfigError(
            f"{hf} holds a {family!r} model, which neither our tables nor the megatron-bridge that is installed know"
        )
    # Convert by megatron-bridge.
    if options.command == "import":
        AutoBridge.import_ckpt(str(hf), str(options.target), **_dtype(options, torch))
    else:
        if options.dtype:
            raise ConfigError(
                f"--dtype {options.dtype} is for our own tables; megatron-bridge exports in the checkpoint's dtype; "
                "leave it out"
            )
        AutoBridge.from_hf_pretrained(str(hf)).export_ckpt(
            str(options.source), str(options.target), show_progress=not options.quiet
        )
    print(f"wrote {options.target}: {family}, by megatron-bridge")
    return 0, {"wrote": str(options.target), "family": family, "by": "megatron-bridge"}


def _dtype(options: argparse.Namespace, torch) -> dict:
    return {"torch_dtype": getattr(torch, options.dtype)} if options.dtype else {}
