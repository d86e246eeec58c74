"""A model and a tokenizer of a few thousand parameters."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCAB = ["<eos>", "<pad>", *"0123456789+-=*/ abcd"]
EOS = 0
TEMPERATURE = 0.7
SIZES = {
    "vocab_size": len(VOCAB),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": EOS,
}


def _tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({token: index for index, token in enumerate(VOCAB)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")


def _model(*, tied: bool = False, scale: float = 0.15) -> Qwen2ForCausalLM:
    config = Qwen2Config(**SIZES, tie_word_embeddings=tied, initializer_range=scale)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = Qwen2ForCausalLM(config)
        for parameter in model.parameters():  # norms and biases too, so that a swapped name would be seen
            parameter.data.add_(0.1 * torch.randn(parameter.shape))
    return model.eval()
