"""A model and a tokenizer of a few thousand parameters, the embedded engine on them, and a plain forward pass."""

import itertools
import pathlib

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from megatron_rl.config import RolloutConfig
from megatron_rl.rollout.engines.embedded import TransformersEngine
from megatron_rl.types import Rollout

VOCAB = ["<eos>", "<pad>", *"0123456789+-=*/ abcd"]
EOS = 0
TEMPERATURE = 0.7
SIZES = {
    "vocab_size": len(VOCAB),
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": EOS,
}
ROUNDING = 1e-5  # of log-probs: cached against full attention in float32; both round, neither is the truth


def _tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({token: index for index, token in enumerate(VOCAB)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")


def merging_tokenizer(letters: str) -> PreTrainedTokenizerFast:
    """Make a BPE tokenizer of four letters that merges every two, wherever they come from; it fills the model's ids."""
    merges = list(itertools.product(letters, letters))
    tokens = ["<eos>", "<pad>", *letters, *map("".join, merges)]
    assert len(tokens) == len(VOCAB)
    core = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")


def _model(*, tied: bool = False, scale: float = 0.15) -> Qwen2ForCausalLM:
    config = Qwen2Config(**SIZES, tie_word_embeddings=tied, initializer_range=scale)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = Qwen2ForCausalLM(config)
        for parameter in model.parameters():  # norms and biases too, so that a swapped name would be seen
            parameter.data.add_(0.1 * torch.randn(parameter.shape))
    return model.eval()


def engine_of(
    hf_path: str | pathlib.Path, model: PreTrainedModel | None, tokenizer: PreTrainedTokenizerFast | None = None,
    kind: type[TransformersEngine] = TransformersEngine, **rollout,
) -> TransformersEngine:
    """Make the embedded engine on the CPU, with the model's weights as version 1; without a model, with none."""
    settings = RolloutConfig(**{"temperature": TEMPERATURE, "max_response_tokens": 12} | rollout)
    given = {"seed": 3, "dtype": torch.float32, "device": torch.device("cpu")}
    engine = kind(str(hf_path), tokenizer or _tokenizer(), settings, **given)
    if model is not None:
        engine.load_weights(iter(model.state_dict().items()), version=1)
    return engine


@torch.no_grad()
def forward_logprobs(model: PreTrainedModel, rollout: Rollout) -> torch.Tensor:
    """Return [response] the log-probs of a rollout's tokens by one forward pass over all of it."""
    prompt = rollout.prompt.token_ids if rollout.context_ids is None else rollout.context_ids
    token_ids = torch.tensor([[*prompt, *rollout.response_ids]])
    logits = model(token_ids).logits[0, len(prompt) - 1 : -1].float() / TEMPERATURE
    return torch.log_softmax(logits, dim=-1).gather(1, token_ids[0, len(prompt) :, None])[:, 0]
