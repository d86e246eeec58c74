"""Measures routing replay in bfloat16: engine and trainer apart, with the router's own experts and with the engine's.

    python tools/benchmarks/routing_replay.py                  # under an environment with vLLM, a CPU is enough
    python tools/benchmarks/routing_replay.py --engine transformers    # by the embedded engine, without vLLM

`make .venv-vllm/.installed` makes such an environment. A random mixture (Qwen3-MoE) is sampled by vLLM, one request at
a time, with a hook on its routers (BaseRouter.set_capture_fn): its builds for the CPU return no experts themselves. The
trainer then takes the log-probs of the samples, under rollout.routing_replay=off and =rollout.

Printed for each: the mean and the largest |log π_trainer − log π_engine| over the response's tokens, in nats. Beside
them the share of tokens, and of tokens and layers, that the trainer's routers send to another set of experts.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
LEAST = {"layers": 1, "hidden": 64, "experts": 3, "prompts": 1, "prompt_tokens": 1, "response_tokens": 1}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], epilog="example: python tools/benchmarks/routing_replay.py --prompts 8"
    )
    parser.add_argument("--engine", choices=["vllm", "transformers"], default="vllm")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128, help="a multiple of 64; heads are of 64")
    parser.add_argument("--experts", type=int, default=16, help="per layer; 2 of them for each token")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--response-tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--json", type=pathlib.Path, help="also write what is printed there")
    parser.add_argument("--sample-into", type=pathlib.Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    for name, least in LEAST.items():
        if vars(given)[name] < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, not {vars(given)[name]}")
    if given.hidden % 64:
        parser.error(f"--hidden must be a multiple of 64, not {given.hidden}")
    return given


def write_model(given: argparse.Namespace, folder: pathlib.Path) -> None:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=given.hidden,
        num_hidden_layers=given.layers,
        num_attention_heads=given.hidden // 64,
        num_key_value_heads=1,
        head_dim=64,
        intermediate_size=given.hidden,
        moe_intermediate_size=given.hidden,
        num_experts=given.experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        initializer_range=0.1,
        tie_word_embeddings=False,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen3MoeForCausalLM(config).to(getattr(torch, given.dtype)).save_pretrained(folder)


def sample(given: argparse.Namespace, folder: pathlib.Path) -> None:
    """Sample by vLLM; write token ids, log-probs and experts of every sample to ``samples.npz`` in the folder."""
    import numpy as np
    from vllm import LLM, SamplingParams
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype=given.dtype,
        enforce_eager=True,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
        max_num_batched_tokens=4096,
        max_model_len=given.prompt_tokens + given.response_tokens,
        logprobs_mode="processed_logprobs",
        max_num_seqs=1,
    )
    passes: list[list[np.ndarray]] = [[] for _ in range(given.layers)]

    def hook(model) -> int:
        runners = [module for module in model.modules() if isinstance(module, MoERunner)]
        for number, runner in enumerate(runners):
            runner.router.set_capture_fn(lambda ids, number=number: passes[number].append(ids.clone().numpy()))
        return len(runners)

    assert llm.apply_model(hook) == [given.layers]
    random, found = np.random.default_rng(0), {}
    tokens = given.prompt_tokens + given.response_tokens
    for i in range(given.prompts):
        for layer in passes:
            layer.clear()
        prompt = random.integers(2, 512, given.prompt_tokens).tolist()
        settings = SamplingParams(
            temperature=1.0, seed=i, max_tokens=given.response_tokens, ignore_eos=True, logprobs=0, detokenize=False
        )
        (output,) = llm.generate([{"prompt_token_ids": prompt}], settings, use_tqdm=False)
        completion = output.outputs[0]
        experts = np.stack([np.concatenate(layer) for layer in passes], axis=1)
        assert experts.shape == (tokens - 1, given.layers, 2), experts.shape
        places = zip(completion.token_ids, completion.logprobs, strict=True)
        found[f"tokens_{i}"] = np.array([*prompt, *completion.token_ids])
        found[f"logprobs_{i}"] = np.array([place[token].logprob for token, place in places], dtype=np.float32)
        found[f"experts_{i}"] = np.concatenate([experts, np.full_like(experts[:1], -1)]).astype(np.int16)
    np.savez(folder / "samples.npz", **found)


def sample_embedded(given: argparse.Namespace, folder: pathlib.Path) -> None:
    """Sample by the embedded engine, all prompts in one batch; write what ``sample`` writes."""
    import numpy as np
    import torch
    from safetensors.torch import load_file
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from megatron_rl.config import RolloutConfig
    from megatron_rl.rollout.transformers_engine import TransformersEngine
    from megatron_rl.types import Prompt

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    rollout = RolloutConfig(max_response_tokens=given.response_tokens, routing_replay="rollout")
    dtype, device = getattr(torch, given.dtype), torch.device("cpu")
    engine = TransformersEngine(str(folder), tokenizer, rollout, seed=0, dtype=dtype, device=device)
    engine.load_weights(iter(load_file(folder / "model.safetensors").items()), version=0)
    random = np.random.default_rng(0)
    prompts = [
        Prompt(
            prompt_id=f"{i}@0",
            text="",
            token_ids=tuple(random.integers(2, 512, given.prompt_tokens).tolist()),
            columns={},
        )
        for i in range(given.prompts)
    ]
    found = {}
    for i, rollout in enumerate(engine.generate(prompts, 1)):
        found[f"tokens_{i}"] = np.array([*rollout.prompt.token_ids, *rollout.response_ids])
        found[f"logprobs_{i}"] = np.array(rollout.logprobs, dtype=np.float32)
        found[f"experts_{i}"] = rollout.routed_experts
    np.savez(folder / "samples.npz", **found)


def measure(given: argparse.Namespace, folder: pathlib.Path) -> dict[str, object]:
    import dataclasses

    import numpy as np

    from megatron_rl.backend import MegatronBackend
    from megatron_rl.config import load_config
    from megatron_rl.types import Sample

    with np.load(folder / "samples.npz") as file:
        samples = [
            Sample(
                sample_id=f"s{i}",
                prompt_tokens=given.prompt_tokens,
                token_ids=file[f"tokens_{i}"],
                loss_mask=np.ones(len(file[f"logprobs_{i}"]), dtype=bool),
                logprobs=file[f"logprobs_{i}"],
                routed_experts=file[f"experts_{i}"],
            )
            for i in range(given.prompts)
        ]
    everything, report = np.ones(given.prompts, dtype=bool), {}
    for replay in ("off", "rollout", "old_logprobs"):
        config = load_config(
            None,
            [f"model.hf_path={folder}", f"model.dtype={given.dtype}", f"rollout.routing_replay={replay}"],
        )
        backend = MegatronBackend(config)
        mine = [
            dataclasses.replace(s, routed_experts=s.routed_experts if replay == "rollout" else None) for s in samples
        ]
        passed = backend.logprobs(backend.gather(mine, list(range(len(mine))), list(range(len(mine)))), everything)
        if replay == "old_logprobs":  # for the trainer's own choice
            own = np.concatenate([np.sort(passed.experts.own[i][:-1], axis=2) for i in range(given.prompts)])
            engine = np.concatenate([np.sort(s.routed_experts[:-1], axis=2) for s in samples])
            elsewhere = (own != engine).any(axis=2)
            report["rerouted_token_share"] = float(elsewhere.any(axis=1).mean())
            report["rerouted_token_and_layer_share"] = float(elsewhere.mean())
        else:
            gaps = np.abs(passed.flat - np.concatenate([s.logprobs for s in samples]))
            report[replay] = {"gap_mean": float(gaps.mean()), "gap_max": float(gaps.max())}
        backend.close(leave_world=replay == "old_logprobs")
    return report


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    if given.sample_into:
        (sample if given.engine == "vllm" else sample_embedded)(given, given.sample_into)
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_model(given, folder)
        quiet = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # for the hook, within this one process
        }
        own = sys.argv[1:] if arguments is None else arguments
        subprocess.run(
            [sys.executable, __file__, *own, "--sample-into", str(folder)],
            check=True,
            env=os.environ | quiet,
            stdout=sys.stderr,
        )
        report = measure(given, folder)
    print(json.dumps(report, indent=2))
    if given.json:
        given.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
