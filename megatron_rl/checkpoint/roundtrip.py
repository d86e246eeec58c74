"""The comparison of `megatron-rl convert roundtrip`: a Hugging Face folder and its conversion there and back.

Every tensor is compared bit by bit. Log-probs of the Megatron model can be compared with log-probs
of transformers' model.
"""

from __future__ import annotations

import pathlib

import torch
import torch.distributed as dist

from megatron_rl.checkpoint.megatron_lm import MegatronFolder, stored_layers
from megatron_rl.config import load_config
from megatron_rl.distributed import platform, topology
from megatron_rl.model.attention import packed as attention
from megatron_rl.model.attention.layout import Layout
from megatron_rl.model.build import build_model
from megatron_rl.model.head import head_weight
from megatron_rl.model.settings import ModelSettings
from megatron_rl.weights.families.register import FAMILIES
from megatron_rl.weights.model_shape import ModelShape
from megatron_rl.weights.reader import HuggingFaceReader
from megatron_rl.weights.side_files import side_files
from megatron_rl.weights.text_part import has_text_part
from megatron_rl.weights.without_fla import without_fla

from megatron.core import dist_checkpointing  # isort: skip  (after platform)

SEQUENCES, MOST_TOKENS = 4, 64


def compare_folders(source: pathlib.Path, back: pathlib.Path, dtype: torch.dtype | None, shape: ModelShape) -> dict:
    """Compare two Hugging Face folders; return counts, and the names of tensors and files that differ.

    In the result ``tensors`` and ``equal`` count all tensors and the equal ones. ``files`` and
    ``equal_files`` count the other files likewise. ``different`` lists the names that differ.

    source: the original Hugging Face folder.
    back: the folder that was converted to Megatron-LM and back.
    dtype: the type to which the source's tensors were cast; None if they were not cast.

    Of a vision-language model the text part is compared, and not its config.json, which is written anew.
    A tied model's own copy of the output matrix, and rotary frequencies that old files hold, are not
    counted.
    """
    ours, theirs = HuggingFaceReader(back), HuggingFaceReader(source)
    different, equal, total = [], 0, 0
    for layer in stored_layers(shape):
        for name, kind in ((name, stored.dtype(dtype)) for stored in layer for name in stored.entry.hf):
            total += 1
            ours_tensor, theirs_tensor = (x.read(name, 0, 0, x.size(name)[0]) for x in (ours, theirs))
            theirs_tensor = theirs_tensor if kind is None else theirs_tensor.to(kind)
            same = ours_tensor.dtype == theirs_tensor.dtype and torch.equal(
                ours_tensor.contiguous().view(torch.uint8), theirs_tensor.contiguous().view(torch.uint8)
            )
            equal += same
            different += [] if same else [name]
        ours.close()
        theirs.close()
    extra = sorted(
        set(ours.files) - {name for layer in stored_layers(shape) for stored in layer for name in stored.entry.hf}
    )
    rewritten = dtype is not None or has_text_part(source)
    files = [x for x in side_files(source) if not (rewritten and x.name == "config.json")]
    unequal = [x.name for x in files if not (back / x.name).exists() or (back / x.name).read_bytes() != x.read_bytes()]
    return {
        "tensors": total,
        "equal": equal,
        "files": len(files),
        "equal_files": len(files) - len(unequal),
        "different": different + extra + unequal,
    }


def random_tokens(vocab_size: int, context_tokens: int) -> torch.Tensor:
    """Return int64 [sequences, tokens], random token ids with a fixed seed, at most ``context_tokens`` a sequence."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.randint(vocab_size, (SEQUENCES, min(MOST_TOKENS, context_tokens)))


@torch.no_grad()
def transformers_logprobs(source: pathlib.Path, hf_config, tokens: torch.Tensor) -> torch.Tensor:
    """Return float32 log-probs [sequences, tokens − 1, vocabulary], computed by transformers' model."""
    from transformers import AutoModelForCausalLM

    experts = {"experts_implementation": "eager"} if FAMILIES[hf_config.model_type].experts else {}
    settings = dict(dtype=torch.float32, local_files_only=True, **experts)
    with without_fla():
        model = AutoModelForCausalLM.from_pretrained(source, **settings).eval()
    return torch.cat([model(row[None, :-1]).logits.float().log_softmax(-1) for row in tokens])


@torch.no_grad()
def megatron_logprobs(checkpoint: MegatronFolder, hf_config, tokens: torch.Tensor) -> torch.Tensor:
    """Return float32 log-probs [sequences, tokens − 1, vocabulary], computed by Megatron-Core's GPTModel.

    Megatron-Core's own ``dist_checkpointing.load`` loads the checkpoint.
    """
    # The world has only this process, however it was launched: topology.initialize alone would leave RANK in the
    # environment.
    dist.init_process_group(platform.HOST.backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        ranks = topology.initialize()
        config = load_config(None, ["model.dtype=float32", "model.layer_spec=torch"])
        (model,), shape = build_model(ModelSettings.of(config), hf_config, ranks)
        asked = {"model": model.sharded_state_dict(metadata={})}
        loaded = dist_checkpointing.load(asked, str(checkpoint.path))
        model.load_state_dict(loaded["model"])
        model.eval()
        rows = tokens[:, :-1].to(platform.HOST.device)
        packed = attention.pack(Layout.of((rows.shape[1],) * len(rows)), platform.HOST.device)
        hidden = model(rows.reshape(1, -1), packed.position_ids[None], None, packed_seq_params=packed)
        logits = hidden.reshape(*rows.shape, -1) @ head_weight(model).T
        return logits[..., : shape.vocab_size].float().log_softmax(-1).cpu()
    finally:
        topology.destroy(leave_world=True)


def check_logits(source: pathlib.Path, checkpoint: MegatronFolder, hf_config) -> dict:
    """Compare the log-probs of a Hugging Face folder and of its Megatron checkpoint, in float32.

    Returns ``logprob_tokens``, the number of compared positions, and ``logprob_gap``, the largest
    absolute difference over all positions and the vocabulary.
    """
    tokens = random_tokens(hf_config.vocab_size, hf_config.max_position_embeddings)
    wanted = transformers_logprobs(source, hf_config, tokens)
    logprobs = megatron_logprobs(checkpoint, hf_config, tokens)
    return {"logprob_tokens": wanted[..., 0].numel(), "logprob_gap": (logprobs - wanted).abs().max().item()}
