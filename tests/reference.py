"""The reference of every equality: a plain single-process loop over a Hugging Face model, one sample at a time.

It uses nothing of the way that data takes through megatron_rl: no plan, no packing, no schedule; only its value types.
"""

import copy
import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import torch

from megatron_rl.types import Sample
from megatron_rl.weights.fused import file_tensors
from megatron_rl.weights.without_fla import without_fla

LAYERS = 2  # of a tiny model: one for either stage of PP=2, and every kind of boundary between two
FAMILIES = (
    *("qwen2_tied", "qwen2_untied", "qwen3", "qwen3_yarn", "llama", "llama3_rope", "mistral"),
    *("phi3", "phi3_partial", "olmo2", "olmo3", "gemma3_text", "qwen3_5_text"),
)
MIXTURES = (
    *("mixtral", "qwen3_moe", "qwen3_moe_unnormalised", "glm4_moe", "gpt_oss"),
    *("deepseek_v3", "moonlight"),
    *("llama4", "llama4_interleaved"),
    *("qwen3_next", "qwen3_5_moe_text"),
)
WINDOWED = ("mistral_window", "phi3_window", "qwen2_window", "qwen3_window", "mixtral_window", "qwen3_moe_window")


def rope(kind: str, factor: float, original: int = 32, theta: float = 1e4, **more: object) -> dict[str, object]:
    """Return transformers' fields of scaled rotary angles."""
    scaled = dict(rope_type=kind, rope_theta=theta, factor=factor, original_max_position_embeddings=original)
    return scaled | more


LLAMA3 = rope("llama3", 4.0, low_freq_factor=1.0, high_freq_factor=2.0)


def tiny_config(family: str, *, vocab_size: int = 99, layers: int = LAYERS, hidden: int = 64):
    """Return a Hugging Face config of 4 heads over 2 key-value heads; the vocabulary is divisible by no TP degree."""
    import transformers

    sizes = dict(vocab_size=vocab_size, hidden_size=hidden, intermediate_size=hidden * 3 // 2, num_hidden_layers=layers)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)
    sizes |= dict(pad_token_id=0, eos_token_id=1, bos_token_id=None)
    if family == "qwen3_5_moe_text":  # a field that its class lacks
        del sizes["intermediate_size"]
    untied, wide = dict(tie_word_embeddings=False), dict(head_dim=hidden // 2)
    own = _dense_fields(family, untied, wide, layers, hidden) or _mixture_fields(family, untied, wide, layers, hidden)
    return getattr(transformers, f"{own.pop('of')}Config")(**sizes | own)


def _dense_fields(family: str, untied: dict, wide: dict, layers: int, hidden: int) -> dict[str, object] | None:
    """Return a dense family's class (``of``) and the fields of its own; None for another family."""
    tied, mistral, phi3 = dict(tie_word_embeddings=True), dict(of="Mistral", **untied), dict(of="Phi3", **untied)
    second_half = dict(use_sliding_window=True, sliding_window=5, max_window_layers=layers // 2)
    kinds = [("sliding_attention", "full_attention")[i % 2] for i in range(layers)]
    near = dict(rope_type="default", rope_theta=1e4)  # angles within a window
    far = dict(rope_type="linear", rope_theta=1e6, factor=8.0)
    mixed, scaled = dict(sliding_window=5, layer_types=kinds), rope("yarn", 4.0, 64)
    families: dict[str, dict[str, object]] = {
        "qwen2_tied": dict(of="Qwen2", **tied),
        "qwen2_untied": dict(of="Qwen2", **untied),
        "qwen2_window": dict(of="Qwen2", **second_half),
        "qwen3": dict(of="Qwen3", **wide, **tied),
        "qwen3_yarn": dict(of="Qwen3", **wide, **tied, rope_parameters=rope("yarn", 4.0)),
        "qwen3_window": dict(of="Qwen3", **second_half),
        "llama": dict(of="Llama", **untied),
        "llama3_rope": dict(of="Llama", **tied, rope_parameters=LLAMA3),
        "mistral": dict(**mistral, **wide, sliding_window=None),
        "mistral_window": dict(**mistral, sliding_window=5),
        "phi3": dict(**phi3, sliding_window=256),
        "phi3_window": dict(**phi3, sliding_window=5),
        "phi3_partial": dict(of="Phi3", **tied, rope_parameters=near | dict(partial_rotary_factor=0.75)),
        "olmo2": dict(of="Olmo2", **untied),
        "olmo3": dict(of="Olmo3", **mixed, rope_parameters=dict(full_attention=scaled, sliding_attention=near)),
        "gemma3_text": dict(of="Gemma3Text", **wide, query_pre_attn_scalar=24, **mixed)
        | dict(rope_parameters=dict(full_attention=far, sliding_attention=near)),
        "qwen3_5_text": dict(of="Qwen3_5Text", **wide, **tied, **_delta_fields(layers, hidden)),
        # built by Megatron-Bridge alone (tests/bridge)
        "gemma": dict(of="Gemma", **wide, hidden_act="gelu_pytorch_tanh", **tied),
        "nemotron": dict(of="Nemotron", head_dim=hidden // 4, hidden_act="relu2", **untied),
    }
    return families.get(family)


def _delta_fields(layers: int, hidden: int) -> dict[str, object]:
    """Return the fields of gated delta nets, in every second layer from the first on; a key head serves two heads."""
    kinds = [("linear_attention", "full_attention")[i % 2] for i in range(layers)]
    return dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=hidden // 4,
                linear_value_head_dim=hidden // 8, layer_types=kinds)


def _mixture_fields(family: str, untied: dict, wide: dict, layers: int, hidden: int) -> dict[str, object]:
    narrow, two = dict(moe_intermediate_size=hidden // 2), dict(num_experts_per_tok=2)
    mixtral, qwen3 = dict(of="Mixtral", num_local_experts=4), dict(of="Qwen3Moe", num_experts=4, **two, **narrow)
    twelve = dict(n_routed_experts=12, num_experts_per_tok=4, n_shared_experts=2, first_k_dense_replace=1, **narrow)
    yarn = dict(beta_fast=32.0, beta_slow=1.0)
    # chunks and steps of the scale that several samples cross
    llama4 = dict(of="Llama4Text", **wide, **untied, attention_chunk_size=4, attn_scale=0.3, floor_scale=3)
    llama4 |= dict(no_rope_layer_interval=2, intermediate_size_mlp=hidden, num_local_experts=4, num_experts_per_tok=1)
    deepseek = dict(of="DeepseekV3", qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, kv_lora_rank=32, **twelve)
    deepseek |= dict(num_key_value_heads=4)
    gated = dict(**wide, **narrow, **two, **_delta_fields(layers, hidden), num_experts=4)
    gated |= dict(shared_expert_intermediate_size=hidden // 4)
    families: dict[str, dict[str, object]] = {
        "mixtral": dict(**mixtral, **two),
        "mixtral_top1": dict(**mixtral, num_experts_per_tok=1),
        "mixtral_window": dict(**mixtral, **two, sliding_window=5),
        "qwen3_moe": dict(**qwen3, **wide, norm_topk_prob=True, tie_word_embeddings=True),
        "qwen3_moe_unnormalised": dict(**qwen3, **wide, norm_topk_prob=False, tie_word_embeddings=True),
        "qwen3_moe_window": dict(**qwen3, norm_topk_prob=True, use_sliding_window=True, sliding_window=5),
        "glm4_moe": dict(of="Glm4Moe", **wide, **twelve, n_group=3, topk_group=2, routed_scaling_factor=1.7)
        | dict(num_mtp_layers=1, attention_bias=True, use_qk_norm=True, **untied),
        # the window is in every second layer, the first among them; gates and ups of these weights pass the limit
        "gpt_oss": dict(of="GptOss", **wide, num_local_experts=4, **two, sliding_window=5, swiglu_limit=2.0, **untied)
        | dict(rope_parameters=rope("yarn", 8.0, **yarn, truncate=False)),
        "llama4": llama4,
        # dense layers between mixtures, no norms of q and k, scaled angles
        "llama4_interleaved": llama4 | dict(interleave_moe_layer_step=2, use_qk_norm=False, rope_parameters=LLAMA3),
        # mscale_all_dim is other than mscale, so that cos and sin are multiplied too
        "deepseek_v3": dict(**deepseek, q_lora_rank=28, n_group=3, topk_group=2)
        | dict(rope_parameters=rope("yarn", 4.0, 64, **yarn, mscale=1.0, mscale_all_dim=0.7)),
        "deepseek_v3_wide": dict(**deepseek | dict(v_head_dim=40), q_lora_rank=28, n_group=1, topk_group=1),
        "qwen3_next": dict(of="Qwen3Next", **gated, **untied, norm_topk_prob=True),
        "qwen3_5_moe_text": dict(of="Qwen3_5MoeText", **gated, **untied),
        # q of the hidden state, plain angles, no groups
        "moonlight": dict(**deepseek, q_lora_rank=None, n_group=1, topk_group=1, rms_norm_eps=1e-5, num_mtp_layers=0),
    }
    return families[family]


def tiny_model(family: str, *, seed: int = 0, layers: int = LAYERS, hidden: int = 64):
    """Return a copy of a tiny config and model of random weights, with biases and norms away from neutral values."""
    return copy.deepcopy(_drawn_model(family, seed, layers, hidden))


@torch.no_grad()
def away_from_neutral(model: torch.nn.Module) -> None:
    """Move biases and norms of a fresh model off 0 and 1, and its logits off the uniform: they would prove little."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or name.endswith("_bias"):  # experts' biases are stacked
            parameter.add_(0.2 * torch.randn_like(parameter))
        else:
            parameter.mul_(3.0)
    for name, buffer in model.named_buffers():  # that moves some tokens to other experts
        if name.endswith("e_score_correction_bias"):
            buffer.add_(0.2 * torch.randn_like(buffer))


@functools.cache
def _drawn_model(family: str, seed: int, layers: int, hidden: int):
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = tiny_config(family, layers=layers, hidden=hidden)
        # a loop over experts, no grouped kernel
        experts = {"experts_implementation": "eager"} if "num_experts_per_tok" in config.to_dict() else {}
        with without_fla():
            model = AutoModelForCausalLM.from_config(config, **experts).float().eval()
        away_from_neutral(model)
    return config, model


def tiny_whole(family: str, *, layers: int = 4, **outer: object):
    """Return a vision-language model of Qwen3.5 around a tiny text model of ``family``, of random weights.

    ``outer``: fields of the config beside ``text_config``.
    """
    import transformers

    kind = {"qwen3_5_text": "Qwen3_5", "qwen3_5_moe_text": "Qwen3_5Moe"}[family]
    tower = dict(depth=1, hidden_size=16, intermediate_size=32, num_heads=2, out_hidden_size=64, patch_size=4)
    text = tiny_config(family, layers=layers).to_dict()
    given = dict(text_config=text, vision_config=tower | dict(num_position_embeddings=16)) | outer
    config = getattr(transformers, f"{kind}Config")(**dict(tie_word_embeddings=text["tie_word_embeddings"]) | given)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        experts = {"experts_implementation": "eager"} if "num_experts" in text else {}
        model = getattr(transformers, f"{kind}ForConditionalGeneration")._from_config(config, **experts).float().eval()
        away_from_neutral(model)
    return model


def make_samples(count: int, *, vocab_size: int = 99, seed: int = 0, unique_lengths: bool = False) -> list[Sample]:
    """Make ragged samples; with ``unique_lengths`` no two have as many tokens, so a length names its sample."""
    random = np.random.default_rng(seed)
    samples = []
    for i in range(count):
        prompt = int(random.integers(2, 7))
        response = int(random.integers(1, 13)) if not unique_lengths else 3 + i
        prompt = 4 if unique_lengths else prompt
        mask = np.ones(response, dtype=bool)
        if response > 3:
            mask[random.integers(0, response - 1)] = False  # a tool's token in mid-response
        tokens = random.integers(2, vocab_size, prompt + response)
        logprobs = random.normal(-2.0, 0.3, response).astype(np.float32)
        samples.append(sample_of(f"s{i}", tokens, response, loss_mask=mask, logprobs=logprobs))
    return samples


def sample_of(sample_id: str, token_ids: np.ndarray, response: int, logprob: float = 0.0, **more: object) -> Sample:
    """Return a sample whose last ``response`` tokens all carry loss."""
    mask, logprobs = np.ones(response, dtype=bool), np.full(response, logprob, dtype=np.float32)
    given = dict(loss_mask=mask, logprobs=logprobs) | more
    return Sample(sample_id=sample_id, prompt_tokens=len(token_ids) - response, token_ids=token_ids, **given)


def reference_logprobs(model, sample: Sample, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs and entropies [response] of one sample by one plain forward."""
    tokens = torch.from_numpy(sample.token_ids)
    logits = model(tokens[None]).logits[0].float() / temperature
    distribution = logits.log_softmax(-1)[sample.prompt_tokens - 1 : -1]
    logprobs = distribution.gather(-1, tokens[sample.prompt_tokens :, None])[:, 0]
    return logprobs, -(distribution.exp() * distribution).sum(-1)


@torch.no_grad()
def masked_logprobs(model, samples: Sequence[Sample], temperature: float = 1.0) -> np.ndarray:
    """Return the samples' log-probs, flat over response tokens, 0 where the mask is."""
    return np.concatenate([reference_logprobs(model, s, temperature)[0].numpy() * s.loss_mask for s in samples])


@torch.no_grad()
def near_policy(model, samples: list[Sample], *, spread: float = 0.2, seed: int = 1) -> list[Sample]:
    """Return the samples with the model's log-probs plus noise: at a clip of 0.2 some ratios are clipped."""
    random = np.random.default_rng(seed)
    noise = [random.normal(0.0, spread, len(s.logprobs)).astype(np.float32) for s in samples]
    return [
        dataclasses.replace(s, logprobs=reference_logprobs(model, s)[0].numpy() + n)
        for s, n in zip(samples, noise, strict=True)
    ]


def token_weight(reduction: str, samples: list[Sample], groups: list[int], i: int, max_response_tokens: int) -> float:
    """Return w_t of sample i by the table of semantics §1, in words of one line for each reduction."""
    tokens = [int(s.loss_mask.sum()) for s in samples]
    match reduction:
        case "token_sum":
            return 1.0
        case "token_mean":
            return 1.0 / sum(tokens)
        case "sequence_mean":
            return 1.0 / (len(samples) * tokens[i])
        case "sequence_sum_mean":
            return 1.0 / len(samples)
        case "sequence_sum_norm":
            return 1.0 / (len(samples) * max_response_tokens)
        case "prompt_mean":
            return 1.0 / (len(set(groups)) * sum(t for t, g in zip(tokens, groups, strict=True) if g == groups[i]))
    raise ValueError(reduction)


def reference_gradient(
    model,
    samples: list[Sample],
    groups: list[int],
    advantages: list[float],
    *,
    reduction: str = "token_mean",
    max_response_tokens: int = 16,
    clip: float = 0.2,
    old: list[torch.Tensor] | None = None,
    temperature: float = 1.0,
    kl: tuple[float, str, list[torch.Tensor]] = (0.0, "", []),
    entropy_coefficient: float = 0.0,
) -> tuple[dict[str, torch.Tensor], float]:
    """Return gradient and loss of the clipped PPO objective over all samples, token by token weight.

    The gradient has the names of checkpoint files; samples of zero advantage count too. kl: its coefficient, its
    estimator, and each sample's log-probs [response] of the reference policy.
    """
    model.zero_grad()
    total = 0.0
    for i, sample in enumerate(samples):
        logprobs, entropy = reference_logprobs(model, sample, temperature)
        before = torch.from_numpy(sample.logprobs) if old is None else old[i]
        ratio = (logprobs - before).exp()
        objective = torch.minimum(ratio * advantages[i], ratio.clamp(1 - clip, 1 + clip) * advantages[i])
        each = -objective - entropy_coefficient * entropy
        if kl[0]:
            each = each + kl[0] * naive_kl(kl[1], logprobs, before, kl[2][i])
        loss = (each * torch.from_numpy(sample.loss_mask)).sum() * token_weight(
            reduction, samples, groups, i, max_response_tokens
        )
        loss.backward()
        total += float(loss.detach())
    return file_tensors(gradient_of(model), model.config.model_type), total


def gradient_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def adamw(model: torch.nn.Module, lr: float, decay: float) -> torch.optim.AdamW:
    """Return torch's AdamW; like Megatron-Core's (0.16.1 ``optimizer/__init__.py``) it decays no bias and no norm."""
    named = [(p.dim() > 1 and not name.endswith("_bias"), p) for name, p in model.named_parameters()]
    matrices, others = ([p for is_matrix, p in named if is_matrix is wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr)


def naive_kl(estimator: str, policy: torch.Tensor, old: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return each token's estimate of KL(π_θ ‖ π_ref), over probabilities, r = π_ref/π_θ, as the papers write it."""
    r = reference.exp() / policy.exp()
    k3 = r - 1 - torch.log(r)
    found = {"k1": -torch.log(r), "k2": torch.log(r) ** 2 / 2, "k3": k3, "unbiased": policy.exp() / old.exp() * k3}
    return found[estimator]


def file_weights(model) -> dict[str, torch.Tensor]:
    """Return a model's weights under the names that its checkpoint's files have."""
    return file_tensors(model.state_dict(), model.config.model_type)


def relative_error(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Return ‖found − wanted‖ / ‖wanted‖ over all tensors together; the names must be the same."""
    assert set(found) == set(wanted), sorted(set(found) ^ set(wanted))
    difference = sum(((found[k] - wanted[k]).double() ** 2).sum() for k in wanted)
    norm = sum((wanted[k].double() ** 2).sum() for k in wanted)
    return float((difference / norm).sqrt())
