"""Model folders that are odd in one way each: `FOLDERS` says what is changed and what has to come of it."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass

import torch
from safetensors.torch import load_file, save_file

from tests.reference import tiny_model

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
Q, DOWN = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"
BLOCK = 16
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A change of a folder that ``save_pretrained`` wrote, and the outcome.

    change: called with the folder.
    refusal: words of the message; None where the model has to give transformers' log-probs.
    shards: whether the folder holds several files under an index.
    """

    change: Callable[[pathlib.Path], None]
    refusal: str | None = None
    family: str = "qwen2_untied"
    overrides: tuple[str, ...] = ()
    shards: bool = False


def write(folder: pathlib.Path, family: str, *, shards: bool) -> None:
    tiny_model(family)[1].save_pretrained(folder, max_shard_size="100KB" if shards else "1GB")


def config(**changes: object) -> Callable[[pathlib.Path], None]:
    """Return a change of config.json's fields; a value of ... removes one."""

    def change(folder: pathlib.Path) -> None:
        fields = json.loads((folder / "config.json").read_text()) | changes
        kept = {name: value for name, value in fields.items() if value is not ...}
        (folder / "config.json").write_text(json.dumps(kept))

    return change


def tensors(edit: Callable[[Tensors], object]) -> Callable[[pathlib.Path], None]:
    """Return a change of the one file's tensors."""

    def change(folder: pathlib.Path) -> None:
        held = load_file(folder / SINGLE)
        edit(held)
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, folder / SINGLE)

    return change


def index(edit: Callable[[dict], object]) -> Callable[[pathlib.Path], None]:
    def change(folder: pathlib.Path) -> None:
        held = json.loads((folder / INDEX).read_text())
        edit(held["weight_map"])
        (folder / INDEX).write_text(json.dumps(held))

    return change


def both(*changes: Callable[[pathlib.Path], None]) -> Callable[[pathlib.Path], None]:
    def change(folder: pathlib.Path) -> None:
        for each in changes:
            each(folder)

    return change


def file(name: str, content: bytes | Callable[[bytes], bytes]) -> Callable[[pathlib.Path], None]:
    def change(folder: pathlib.Path) -> None:
        path = folder / name
        path.write_bytes(content if isinstance(content, bytes) else content(path.read_bytes()))

    return change


def in_fp8(held: Tensors) -> None:
    """Put every projection in block FP8, with scales that differ from block to block."""
    for name in [x for x in held if "_proj" in x and x.endswith(".weight")]:
        rows, columns = held[name].shape
        blocks = held[name].view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scale = blocks.abs().amax((1, 3)) / 448.0
        held[name] = (blocks / scale[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
        held[f"{name}_scale_inv"] = scale


def each_to(dtype: torch.dtype, *, norms: torch.dtype | None = None) -> Callable[[Tensors], None]:
    return lambda held: held.update(
        {name: x.to(norms if norms is not None and x.dim() == 1 else dtype) for name, x in held.items()}
    )


def set_to(name: str, place: tuple[int, ...], value: float) -> Callable[[Tensors], None]:
    return lambda held: held[name].__setitem__(place, value)


def fp8(**changes: object) -> dict[str, object]:
    settings = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
    return {"quantization_config": settings | changes}


def move_out(folder: pathlib.Path) -> None:
    """Put one shard beside the folder, and have the index name it there."""
    names = sorted(x.name for x in folder.glob("*.safetensors"))
    shutil.move(folder / names[0], folder.parent / f"{folder.name}-{names[0]}")
    index(lambda m: m.update({k: f"../{folder.name}-{names[0]}" for k, part in m.items() if part == names[0]}))(folder)


def quantised(**settings: object) -> Callable[[pathlib.Path], None]:
    return config(quantization_config=settings)


def first_shard_of(folder: pathlib.Path) -> pathlib.Path:
    return sorted(folder.glob("model-*.safetensors"))[0]


FOLDERS = {
    # ---- read, with transformers' log-probs
    "whole": Folder(change=config()),
    "shards": Folder(change=config(), shards=True),
    "a tied model with a copy of its embedding": Folder(
        change=tensors(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})),
        family="qwen2_tied",
    ),
    "a tied model with a head of its own": Folder(
        change=tensors(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].flip(0)})),
        family="qwen2_tied",
    ),
    "float16": Folder(change=tensors(each_to(torch.float16))),
    "bfloat16 with float32 norms": Folder(change=tensors(each_to(torch.bfloat16, norms=torch.float32))),
    "rotary frequencies in the file": Folder(
        change=tensors(lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})),
        family="llama",
    ),
    "dropout": Folder(change=config(attention_dropout=0.5)),
    "fields of no meaning": Folder(change=config(final_logit_softcapping=30.0, qk_norm=True)),
    "other weights beside": Folder(change=file("consolidated.safetensors", b"")),
    "a tensor too many, allowed": Folder(
        change=tensors(lambda t: t.update({"model.extra.weight": torch.ones(3)})),
        overrides=("model.allow_unread_tensors=true",),
    ),
    "block FP8": Folder(change=both(tensors(in_fp8), config(**fp8()))),
    "block FP8 of experts": Folder(change=both(tensors(in_fp8), config(**fp8())), family="qwen3_moe"),
    # ---- quantised
    "GPTQ": Folder(change=quantised(quant_method="gptq", bits=4), refusal="quantised by 'gptq'"),
    "AWQ": Folder(change=quantised(quant_method="awq"), refusal="quantised by 'awq'"),
    "bitsandbytes": Folder(
        change=both(
            tensors(lambda t: t.update({Q: t[Q].to(torch.int8), Q.replace("weight", "SCB"): torch.ones(64)})),
            quantised(quant_method="bitsandbytes", load_in_8bit=True),
        ),
        refusal="quantised by 'bitsandbytes'",
    ),
    "bitsandbytes without its config": Folder(
        change=tensors(lambda t: t.update({Q: t[Q].to(torch.int8), Q.replace("weight", "SCB"): torch.ones(64)})),
        refusal="self_attn.q_proj.SCB; they are those of bitsandbytes int8",
    ),
    "GPTQ without its config": Folder(
        change=tensors(lambda t: t.update({Q.replace("weight", "qweight"): t.pop(Q).to(torch.int32)})),
        refusal="self_attn.q_proj.qweight; they are those of GPTQ or AWQ",
        overrides=("model.allow_unread_tensors=true",),
    ),
    "FP8 without its config": Folder(change=tensors(in_fp8), refusal="weight_scale_inv; they are those of FP8"),
    "FP8 of one scale": Folder(
        change=both(tensors(in_fp8), config(**fp8(weight_block_size=None))), refusal="fp8 without weight_block_size"
    ),
    "static FP8": Folder(
        change=both(tensors(in_fp8), config(**fp8(activation_scheme="static"))), refusal="activation_scheme='static'"
    ),
    "FP8 whose scale is lost": Folder(
        change=both(tensors(lambda t: (in_fp8(t), t.pop(f"{Q}_scale_inv"))), config(**fp8())),
        refusal=f"{Q} in .* is F8_E4M3; only .* are read",
    ),
    "FP8 with scales of other blocks": Folder(
        change=both(tensors(in_fp8), config(**fp8(weight_block_size=[BLOCK, 2 * BLOCK]))),
        refusal=r"weight_scale_inv in .* is F32 of shape .* have \(\d+, \d+\) scales",
    ),
    "FP8 with a scale that is no number": Folder(
        change=both(tensors(lambda t: (in_fp8(t), set_to(f"{Q}_scale_inv", (0, 0), torch.nan)(t))), config(**fp8())),
        refusal=f"{Q} holds 256 numbers that are NaN or infinite, of 4096",
    ),
    "integers": Folder(change=tensors(each_to(torch.int8)), refusal="is I8; only F32, BF16, F16 are read"),
    "float64": Folder(change=tensors(each_to(torch.float64)), refusal="is F64; only F32, BF16, F16 are read"),
    # ---- config and files disagree
    "a layer too many": Folder(
        change=config(num_hidden_layers=1, layer_types=...),
        refusal="config.json says num_hidden_layers=1 and the files hold 2 layers, 0 to 1",
    ),
    "a layer too few": Folder(
        change=config(num_hidden_layers=4, layer_types=...),
        refusal="config.json says num_hidden_layers=4 and the files hold 2 layers, 0 to 1",
    ),
    "a tensor too many": Folder(
        change=tensors(lambda t: t.update({"model.extra.weight": torch.ones(3)})),
        refusal="holds 1 tensors that the model is not made of, model.extra.weight; "
        "set model.allow_unread_tensors=true",
    ),
    "a tensor too few": Folder(change=tensors(lambda t: t.pop(DOWN)), refusal=f"holds no tensor named {DOWN}"),
    "a head too few": Folder(
        change=tensors(lambda t: t.pop("lm_head.weight")), refusal="holds no tensor named lm_head.weight"
    ),
    "biases that the family has not": Folder(
        change=config(model_type="llama", attention_bias=False),
        refusal="holds 6 tensors that the model is not made of, model.layers.0.self_attn.k_proj.bias",
    ),
    "another width": Folder(
        change=config(intermediate_size=128), refusal=r"has shape \(64, 96\) and the config asks for \(64, 128\)"
    ),
    "another vocabulary": Folder(
        change=config(vocab_size=100), refusal=r"has shape \(99, 64\) and the config asks for \(100, 64\)"
    ),
    "a layer of sliding attention": Folder(
        change=config(layer_types=["full_attention", "sliding_attention"]),
        refusal="sliding_window=None of qwen2 with sliding_attention",
    ),
    "attention to what follows": Folder(change=config(is_causal=False), refusal="is_causal=False of qwen2"),
    # ---- numbers
    "NaN": Folder(change=tensors(set_to(DOWN, (3, 3), torch.nan)), refusal=f"{DOWN} holds 1 numbers that are NaN"),
    "infinity": Folder(
        change=tensors(set_to("model.norm.weight", (0,), torch.inf)), refusal="model.norm.weight holds 1 numbers that"
    ),
    "numbers beyond bfloat16": Folder(
        change=tensors(set_to(DOWN, (0, 0), 3.4e38)),
        refusal=f"{DOWN} hold numbers that torch.bfloat16 has no place for; set model.dtype=float32",
        overrides=("model.dtype=bfloat16",),
    ),
    # ---- files
    "a path out of the folder": Folder(
        change=move_out, refusal=r"names '\.\./.*it must be a .safetensors file in the same folder", shards=True
    ),
    "an absolute path": Folder(
        change=index(lambda m: m.update({Q: "/dev/zero"})),
        refusal="names '/dev/zero'; it must be a .safetensors file in the same folder",
        shards=True,
    ),
    "a shard that is no name": Folder(
        change=index(lambda m: m.update({Q: 3})), refusal=f"weight_map.{Q} must be a text, and it is 3", shards=True
    ),
    "a shard that is not there": Folder(
        change=lambda folder: first_shard_of(folder).unlink(),
        refusal="model-00001.*cannot be read as safetensors: it does not exist",
        shards=True,
    ),
    "a tensor that its shard does not hold": Folder(
        change=index(lambda m: m.update({"model.nothing": m[Q]})),
        refusal="says that model.nothing is in .*, and that file does not hold it",
        shards=True,
    ),
    "a tensor that the index does not name": Folder(
        change=index(lambda m: m.pop(Q)), refusal=f"does not give to it, {Q} the first", shards=True
    ),
    "an index that is a list": Folder(
        change=file(INDEX, b'{"weight_map": []}'), refusal="weight_map must be an object, and it is", shards=True
    ),
    "an index with a key twice": Folder(
        change=file(INDEX, lambda b: b.replace(b'"weight_map": {', b'"weight_map": {"a": "b", "a": "c", ')),
        refusal="index.json: the key 'a' stands twice",
        shards=True,
    ),
    "an index cut short": Folder(
        change=file(INDEX, lambda b: b[: len(b) // 2]), refusal="index.json: not valid JSON", shards=True
    ),
    "two models in one folder": Folder(
        change=lambda folder: shutil.copy(first_shard_of(folder), folder / SINGLE),
        refusal="holds both model.safetensors and model.safetensors.index.json",
        shards=True,
    ),
    "a file cut short": Folder(
        change=file(SINGLE, lambda b: b[:-100]), refusal="model.safetensors cannot be read as safetensors"
    ),
    "an empty file": Folder(change=file(SINGLE, b""), refusal="model.safetensors cannot be read as safetensors"),
    "a header of 2⁶⁰ bytes": Folder(
        change=file(SINGLE, lambda b: (2**60).to_bytes(8, "little") + b[8:]),
        refusal="model.safetensors cannot be read as safetensors",
    ),
    "a header that is no JSON": Folder(
        change=file(SINGLE, lambda b: b[:8] + b"x" + b[9:]), refusal="model.safetensors cannot be read as safetensors"
    ),
    "a header of deep brackets": Folder(
        change=file(SINGLE, (10**5).to_bytes(8, "little") + b"[" * 10**5),
        refusal="model.safetensors cannot be read as safetensors",
    ),
    "a header with another length": Folder(
        change=file(SINGLE, lambda b: b.replace(b'"shape":[99,64]', b'"shape":[98,64]')),
        refusal="model.safetensors cannot be read as safetensors",
    ),
    "a folder in place of the file": Folder(
        change=lambda folder: ((folder / SINGLE).unlink(), (folder / SINGLE).mkdir()),
        refusal="model.safetensors cannot be read as safetensors",
    ),
    "no weights": Folder(change=lambda folder: (folder / SINGLE).unlink(), refusal="holds neither model.safetensors"),
}
