"""Model folders that are odd in one way each: `FOLDERS` says what is changed and what has to come of it."""

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
BLOCK, TIED = 16, "qwen2_tied"
HUGE, RANDOM = dict(hidden_size=2**20, intermediate_size=2**24, vocab_size=2**26), ("model.init=random",)
Tensors = dict[str, torch.Tensor]
Change = Callable[[pathlib.Path], object]


@dataclass(frozen=True)
class Folder:
    """A change of a folder that ``save_pretrained`` wrote, called with its path, and the outcome.

    refusal: words of the message; None where the model has to give transformers' log-probs. shards: under an index.
    """

    change: Change
    refusal: str | None = None
    family: str = "qwen2_untied"
    overrides: tuple[str, ...] = ()
    shards: bool = False


def write(folder: pathlib.Path, family: str, *, shards: bool) -> None:
    tiny_model(family)[1].save_pretrained(folder, max_shard_size="100KB" if shards else "1GB")


def config(**changes: object) -> Change:
    """Return a change of config.json's fields; a value of ... removes one."""

    def changed(content: bytes) -> bytes:
        fields = json.loads(content) | changes
        return json.dumps({name: x for name, x in fields.items() if x is not ...}).encode()

    return file("config.json", changed)


def tensors(edit: Callable[[Tensors], object]) -> Change:
    """Return a change of the one file's tensors."""

    def change(folder: pathlib.Path) -> None:
        held = load_file(folder / SINGLE)
        edit(held)
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, folder / SINGLE)

    return change


def with_tensor(name: str, of: Callable[[Tensors], torch.Tensor]) -> Change:
    return tensors(lambda held: held.update({name: of(held)}))


def index(edit: Callable[[dict], object]) -> Change:
    def changed(content: bytes) -> bytes:
        held = json.loads(content)
        edit(held["weight_map"])
        return json.dumps(held).encode()

    return file(INDEX, changed)


def both(*changes: Change) -> Change:
    return lambda folder: [each(folder) for each in changes]


def file(name: str, content: bytes | Callable[[bytes], bytes]) -> Change:
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
        {name: x.to(norms if norms and x.dim() == 1 else dtype) for name, x in held.items()}
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


def quantised(**settings: object) -> Change:
    return config(quantization_config=settings)


def first_shard_of(folder: pathlib.Path) -> pathlib.Path:
    return sorted(folder.glob("model-*.safetensors"))[0]


def eight_bit(held: Tensors) -> None:
    held.update({Q: held[Q].to(torch.int8), Q.replace("weight", "SCB"): torch.ones(64)})


IN_FP8, EMBEDDING, HEAD = tensors(in_fp8), "model.embed_tokens.weight", "lm_head.weight"
UNREAD = ("model.allow_unread_tensors=true",)
EXTRA = with_tensor("model.extra.weight", lambda t: torch.ones(3))
READ = {  # with transformers' log-probs
    "whole": Folder(config()),
    "shards": Folder(config(), shards=True),
    "a tied model with a copy of its embedding": Folder(with_tensor(HEAD, lambda t: t[EMBEDDING].clone()), None, TIED),
    "a tied model with a head of its own": Folder(with_tensor(HEAD, lambda t: t[EMBEDDING].flip(0)), None, TIED),
    "float16": Folder(tensors(each_to(torch.float16))),
    "bfloat16 with float32 norms": Folder(tensors(each_to(torch.bfloat16, norms=torch.float32))),
    "rotary frequencies in the file": Folder(
        with_tensor("model.layers.0.self_attn.rotary_emb.inv_freq", lambda t: torch.ones(8)), family="llama"
    ),
    "dropout": Folder(config(attention_dropout=0.5)),
    "fields of other families": Folder(config(final_logit_softcapping=3.0, qk_norm=True, query_pre_attn_scalar=7)),
    "other weights beside": Folder(file("consolidated.safetensors", b"")),
    "a tensor too many, allowed": Folder(EXTRA, overrides=UNREAD),
    "block FP8": Folder(both(IN_FP8, config(**fp8()))),
    "block FP8 of experts": Folder(both(IN_FP8, config(**fp8())), family="qwen3_moe"),
}
QUANTISED = {
    "GPTQ": Folder(quantised(quant_method="gptq", bits=4), "quantised by 'gptq'"),
    "AWQ": Folder(quantised(quant_method="awq"), "quantised by 'awq'"),
    "bitsandbytes": Folder(both(tensors(eight_bit), quantised(quant_method="bitsandbytes", load_in_8bit=True)),
                           "quantised by 'bitsandbytes'"),
    "bitsandbytes without its config": Folder(tensors(eight_bit),
                                              "self_attn.q_proj.SCB; they are those of bitsandbytes int8"),
    "GPTQ without its config": Folder(
        tensors(lambda t: t.update({Q.replace("weight", "qweight"): t.pop(Q).to(torch.int32)})),
        "self_attn.q_proj.qweight; they are those of GPTQ or AWQ",
        overrides=UNREAD,
    ),
    "FP8 without its config": Folder(IN_FP8, "weight_scale_inv; they are those of FP8"),
    "FP8 of one scale": Folder(both(IN_FP8, config(**fp8(weight_block_size=None))), "fp8 without weight_block_size"),
    "static FP8": Folder(both(IN_FP8, config(**fp8(activation_scheme="static"))), "activation_scheme='static'"),
    "FP8 whose scale is lost": Folder(both(tensors(lambda t: (in_fp8(t), t.pop(f"{Q}_scale_inv"))), config(**fp8())),
                                      f"{Q} in .* is F8_E4M3; only .* are read"),
    "FP8 with scales of other blocks": Folder(both(IN_FP8, config(**fp8(weight_block_size=[BLOCK, 2 * BLOCK]))),
                                              r"weight_scale_inv in .* is F32 of shape .* have \(\d+, \d+\) scales"),
    "FP8 with a scale that is no number": Folder(
        both(IN_FP8, tensors(set_to(f"{Q}_scale_inv", (0, 0), torch.nan)), config(**fp8())),
        f"{Q} holds 256 numbers that are NaN or infinite, of 4096",
    ),
    "integers": Folder(tensors(each_to(torch.int8)), "is I8; only F32, BF16, F16 are read"),
    "float64": Folder(tensors(each_to(torch.float64)), "is F64; only F32, BF16, F16 are read"),
}
DISAGREE = {  # config and files
    "a layer too many": Folder(config(num_hidden_layers=1, layer_types=...),
                               "says num_hidden_layers=1 and the files hold 2 layers, 0 to 1"),
    "a layer too few": Folder(config(num_hidden_layers=4, layer_types=...),
                              "says num_hidden_layers=4 and the files hold 2 layers, 0 to 1"),
    "a tensor too many": Folder(EXTRA, "model is not made of, model.extra.weight; set model.allow_unread_tensors=true"),
    "a tensor too few": Folder(tensors(lambda t: t.pop(DOWN)), f"holds no tensor named {DOWN}"),
    "a head too few": Folder(tensors(lambda t: t.pop(HEAD)), "holds no tensor named lm_head.weight"),
    "biases that the family has not": Folder(
        config(model_type="llama", attention_bias=False),
        "holds 6 tensors that the model is not made of, model.layers.0.self_attn.k_proj.bias",
    ),
    "another width": Folder(config(intermediate_size=128), r"has shape \(64, 96\) and the config asks for \(64, 128\)"),
    "another vocabulary": Folder(config(vocab_size=100), r"has shape \(99, 64\) and the config asks for \(100, 64\)"),
    "a width beyond any memory": Folder(config(**HUGE), r"has shape .* and the config asks for \("),
    "random weights beyond any memory": Folder(config(**HUGE), "asks for .* random weights", overrides=RANDOM),
    "a layer of sliding attention": Folder(config(layer_types=["full_attention", "sliding_attention"]),
                                           "sliding_window=None of qwen2 with sliding_attention"),
    "attention to what follows": Folder(config(is_causal=False), "is_causal=False of qwen2"),
    "NaN": Folder(tensors(set_to(DOWN, (3, 3), torch.nan)), f"{DOWN} holds 1 numbers that are NaN"),
    "infinity": Folder(tensors(set_to("model.norm.weight", (0,), torch.inf)), "model.norm.weight holds 1 numbers that"),
    "numbers beyond bfloat16": Folder(
        tensors(set_to(DOWN, (0, 0), 3.4e38)),
        f"{DOWN} hold numbers that torch.bfloat16 has no place for; set model.dtype=float32",
        overrides=("model.dtype=bfloat16",),
    ),
}
UNREADABLE = "model.safetensors cannot be read as safetensors"
FILES = {
    "a file cut short": Folder(file(SINGLE, lambda b: b[:-100]), UNREADABLE),
    "an empty file": Folder(file(SINGLE, b""), UNREADABLE),
    "a header of 2⁶⁰ bytes": Folder(file(SINGLE, lambda b: (2**60).to_bytes(8, "little") + b[8:]), UNREADABLE),
    "a header that is no JSON": Folder(file(SINGLE, lambda b: b[:8] + b"x" + b[9:]), UNREADABLE),
    "a header of deep brackets": Folder(file(SINGLE, (10**5).to_bytes(8, "little") + b"[" * 10**5), UNREADABLE),
    "a header with another length": Folder(file(SINGLE, lambda b: b.replace(b'"shape":[99,64]', b'"shape":[98,64]')),
                                           UNREADABLE),
    "a folder in place of the file": Folder(lambda folder: ((folder / SINGLE).unlink(), (folder / SINGLE).mkdir()),
                                            UNREADABLE),
    "no weights": Folder(lambda folder: (folder / SINGLE).unlink(), "holds neither model.safetensors"),
}
OUTSIDE = "it must be a .safetensors file in the same folder"
UNDER_AN_INDEX: dict[str, tuple[Change, str]] = {
    "a path out of the folder": (move_out, rf"names '\.\./.*{OUTSIDE}"),
    "an absolute path": (index(lambda m: m.update({Q: "/dev/zero"})), f"names '/dev/zero'; {OUTSIDE}"),
    "a shard that is no name": (index(lambda m: m.update({Q: 3})), f"weight_map.{Q} must be a text, and it is 3"),
    "a shard that is not there": (lambda folder: first_shard_of(folder).unlink(),
                                  "model-00001.*cannot be read as safetensors: it does not exist"),
    "a tensor that its shard does not hold": (index(lambda m: m.update({"model.nothing": m[Q]})),
                                              "says that model.nothing is in .*, and that file does not hold it"),
    "a tensor that the index does not name": (index(lambda m: m.pop(Q)), f"does not give to it, {Q} the first"),
    "an index that is a list": (file(INDEX, b'{"weight_map": []}'), "weight_map must be an object, and it is"),
    "an index with a key twice": (
        file(INDEX, lambda b: b.replace(b'"weight_map": {', b'"weight_map": {"a": "b", "a": "c", ')),
        "index.json: the key 'a' stands twice",
    ),
    "an index cut short": (file(INDEX, lambda b: b[: len(b) // 2]), "index.json: not valid JSON"),
    "two models in one folder": (lambda folder: shutil.copy(first_shard_of(folder), folder / SINGLE),
                                 "holds both model.safetensors and model.safetensors.index.json"),
}
SHARDED = {name: Folder(*row, shards=True) for name, row in UNDER_AN_INDEX.items()}
FOLDERS = READ | QUANTISED | DISAGREE | FILES | SHARDED
