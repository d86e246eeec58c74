"""Folders of drafters with random weights: draft models, heads as EAGLE's and EAGLE-3's releases, and MTP heads."""

import json
import pathlib
import shutil

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from tests.reference import file_weights, tiny_model
from tests.vllm.rig import hugging_face, model_folder, random_weights

HIDDEN, HEADS, WIDTH, INNER = 64, 2, 32, 96


def draft_model(source: pathlib.Path, folder: pathlib.Path, seed: int, *, intermediate: int = 96) -> pathlib.Path:
    """Write a qwen2 with the weights that ``random_weights`` draws by the seed; ``source`` has the tokenizer."""
    model = hugging_face(model_folder(source, folder, "qwen2", tied=True, intermediate=intermediate))
    model.load_state_dict(random_weights(model, seed), strict=False)
    model.save_pretrained(folder)
    return folder


def _layer(name: str, inputs: int) -> dict[str, tuple[int, ...]]:
    """Return the sizes of a decoder layer's tensors; inputs: the width of what attention reads."""
    attention = {f"self_attn.{x}_proj": (HEADS * WIDTH if x == "q" else WIDTH, inputs) for x in "qkv"}
    mlp = {"mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER)}
    parts = attention | {"self_attn.o_proj": (HIDDEN, HEADS * WIDTH)} | mlp | {"post_attention_layernorm": (HIDDEN,)}
    return {f"{name}.{part}.weight": size for part, size in parts.items()}


def head(folder: pathlib.Path, method: str, vocab_size: int = 17) -> pathlib.Path:
    """Write a head of one layer. EAGLE's shares the policy's embedding and output; EAGLE-3's has an output layer."""
    if method == "eagle":
        names, sizes = ["LlamaForCausalLM"], _layer("layers.0", HIDDEN) | {"fc.weight": (HIDDEN, 2 * HIDDEN)}
    else:
        norms = ("midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight", "norm.weight")
        sizes = _layer("midlayer", 2 * HIDDEN) | dict.fromkeys(norms, (HIDDEN,))
        sizes |= {"fc.weight": (HIDDEN, 2 * HIDDEN), "lm_head.weight": (vocab_size, HIDDEN)}
        names = ["LlamaForCausalLMEagle3"]
    generator = torch.Generator().manual_seed(7)
    drawn = {
        name: float("norm" in name) + 0.2 * torch.randn(size, generator=generator) for name, size in sizes.items()
    }
    layers = dict(hidden_size=HIDDEN, num_hidden_layers=1, intermediate_size=INNER, max_position_embeddings=512)
    heads = dict(num_attention_heads=HEADS, num_key_value_heads=1, head_dim=WIDTH, vocab_size=vocab_size)
    LlamaConfig(**layers, **heads, dtype="float32", architectures=names).save_pretrained(folder)
    if method == "eagle3":  # the policy has two layers, and the default names three
        path = folder / "config.json"
        layers = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}
        path.write_text(json.dumps(json.loads(path.read_text()) | layers | {"draft_vocab_size": vocab_size}))
    save_file(drawn, folder / "model.safetensors")
    return folder


def model_with_heads(source: pathlib.Path, folder: pathlib.Path, family: str = "glm4_moe") -> torch.nn.Module:
    """Write a model's folder with the weights of one MTP layer behind its last layer; return the model without it.

    The layer's decoder is the last layer of a model with one more. ``source`` has the tokenizer.
    """
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "*config.json"))
    config, model = tiny_model(family)
    number = config.num_hidden_layers
    _, longer = tiny_model(family, layers=number + 1)
    layer = f"model.layers.{number}."
    generator, hidden = torch.Generator().manual_seed(7), config.hidden_size
    own = {f"{layer}{name}.weight": 1.0 + 0.2 * torch.randn(hidden, generator=generator)
           for name in ("enorm", "hnorm", "shared_head.norm")}  # fmt: skip
    own[f"{layer}eh_proj.weight"] = 0.2 * torch.randn(hidden, 2 * hidden, generator=generator)
    own |= {name: tensor for name, tensor in file_weights(longer).items() if name.startswith(layer)}
    weights = file_weights(model)
    own[f"{layer}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    own[f"{layer}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    config.num_nextn_predict_layers = 1
    config.architectures, config.dtype = [type(model).__name__], torch.float32
    config.save_pretrained(folder)
    save_file({name: tensor.contiguous() for name, tensor in (weights | own).items()}, folder / "model.safetensors")
    return model
