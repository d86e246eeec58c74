"""The rig of the tests with a real embedded engine: models, weights by seed, Hugging Face's forward, syncs."""

import contextlib
import itertools
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from megatron_rl.config import Config, load_config
from megatron_rl.rollout.build import place_engine
from megatron_rl.rollout.engines.embedded import TransformersEngine
from megatron_rl.rollout.engines.engine import SyncReport
from megatron_rl.rollout.engines.placement import RankLocation
from megatron_rl.rollout.vllm.engine import VllmEngine
from megatron_rl.rollout.vllm.process_replica import ProcessReplica
from megatron_rl.rollout.weight_sync.sender import WeightSender
from megatron_rl.rollout.weight_sync.transport import SEGMENT_PREFIX, segment_folders
from megatron_rl.types import Prompt, Rollout
from tests.patience import patient

# float32 on both sides, other kernels; vLLM's CPU build was within 5e-6 of Hugging Face. It is issue 6's bound.
LOGPROB_TOLERANCE = 1e-4
START_S = patient(180.0)  # 10 to 20 s where nothing else runs
REQUEST_S = patient(60.0)
DEADLINE_S = patient(120.0)  # no engine that is well is this late
BLOCK_TOKENS = 32  # of the prefix cache; see vllm/arguments.py
CPU = torch.device("cpu")
CONFIGS = {"qwen2": transformers.Qwen2Config, "llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}


def model_folder(source: pathlib.Path, folder: pathlib.Path, family: str, *, tied: bool,
                 intermediate: int = 96) -> pathlib.Path:
    """Write config.json and tokenizer without weights, which come by sync; ``source`` has the tokenizer."""
    ignore = shutil.ignore_patterns("*.safetensors", "config.json", "generation_config.json")
    shutil.copytree(source, folder, ignore=ignore)
    sizes = dict(hidden_size=64, num_hidden_layers=2, intermediate_size=intermediate, max_position_embeddings=512)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    names = [AutoModelForCausalLM._model_mapping[CONFIGS[family]].__name__]
    tokens = dict(bos_token_id=None, eos_token_id=0, pad_token_id=1, tie_word_embeddings=tied)
    tokens["vocab_size"] = json.loads((source / "config.json").read_text())["vocab_size"]
    CONFIGS[family](**sizes, **heads, **tokens, dtype="float32", architectures=names).save_pretrained(folder)
    return folder


def config_of(folder: pathlib.Path, run_dir: pathlib.Path, *overrides: str) -> Config:
    bounds = (f"rollout.start_s={START_S}", f"rollout.request_s={REQUEST_S}", f"weight_sync.deadline_s={DEADLINE_S}")
    fixed = ("model.dtype=float32", "rollout.engine=vllm", "rollout.vllm={max_num_seqs: 64}", *bounds)
    sizes = ("data.max_prompt_tokens=160", "rollout.max_response_tokens=24", "rollout.temperature=0.7")
    return load_config(None, [f"model.hf_path={folder}", f"run.dir={run_dir}", *fixed, *sizes, *overrides])


def hugging_face(folder: pathlib.Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).eval()


def random_weights(model: PreTrainedModel, seed: int) -> dict[str, torch.Tensor]:
    """Draw every weight under its name in a checkpoint, norms and biases too, so that a swapped name would be seen."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: float(name.endswith("norm.weight")) + 0.2 * torch.randn(parameter.shape, generator=generator)
        for name, parameter in model.named_parameters()  # a tied output layer is not listed
    }


@torch.no_grad()
def logprobs_after(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int], temperature: float):
    """Return Hugging Face's log-probs of ``tokens`` after a prompt."""
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, dim=-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()


def gap_of(model: PreTrainedModel, rollout: Rollout, temperature: float) -> np.ndarray:
    """Return how far each log-prob of a rollout is from Hugging Face's."""
    wanted = logprobs_after(model, rollout.prompt.token_ids, rollout.response_ids, temperature)
    return np.abs(np.array(rollout.logprobs) - wanted)


def make_prompts(*lengths: int, vocab_size: int = 17) -> list[Prompt]:
    generator = np.random.default_rng(len(lengths))
    ids = [tuple(generator.integers(2, vocab_size, size=length).tolist()) for length in lengths]
    return [Prompt(prompt_id=f"{index}@0", text="", token_ids=each, columns={}) for index, each in enumerate(ids)]


def told(rollouts: Iterable[Rollout]) -> list[tuple]:
    """Return the parts of rollouts that must be equal where two calls are to give the same."""
    return [(x.sample_id, x.response_ids, x.finish_reason) for x in rollouts]


@dataclass
class Bench:
    """An engine of one rank in a process of its own, and Hugging Face's model to compare with."""

    folder: pathlib.Path
    config: Config
    engine: VllmEngine
    model: PreTrainedModel
    versions: Iterator[int] = field(default_factory=lambda: itertools.count())

    @property
    def replica(self) -> ProcessReplica:
        return self.engine._replicas[0]

    @property
    def pid(self) -> int:
        return self.replica.pid

    def weights(self, seed: int) -> dict[str, torch.Tensor]:
        """Draw weights by seed, load them into the reference and return them."""
        found = random_weights(self.model, seed)
        self.model.load_state_dict(found, strict=False)
        return found

    def sync(self, weights: Iterable[tuple[str, torch.Tensor]], **changes) -> SyncReport:
        """Run a sync that need not succeed, by a sender of its own where ``changes`` says something of one."""
        version = next(self.versions)
        if changes:
            sender = sender_of(**changes)
            report = sender.deliver(iter(weights), version, [self.replica])
            sender.forget(self.replica)
            assert report.failed or changes.get("channel", "shared_memory") != "shared_memory" or any(sender.buffers)
            sender.free()
            self.engine._sync.forget(self.replica)
        else:
            report = self.engine.load_weights(iter(weights), version)
        self.engine.take_report(version, report.failed, report.lost)
        return report

    def load(self, seed: int, **changes) -> int:
        """Load the weights of a seed in engine and reference and return their version."""
        report = self.sync(self.weights(seed).items(), **changes)
        assert not report.failed, report.failed
        return report.version

    def watch_control(self, planted: pytest.MonkeyPatch, watch: Callable[[str, dict], object]) -> None:
        """Call ``watch(method, arguments)`` before each control message, which is not sent where it returns False."""
        control = self.replica.control

        def watched(method, arguments, timeout_s):
            return None if watch(method, arguments) is False else control(method, arguments, timeout_s)

        planted.setattr(self.replica, "control", watched)

    def skip_resets(self, planted: pytest.MonkeyPatch) -> None:
        self.watch_control(planted, lambda method, _: method != "reset_prefix_cache")

    def in_this_process(self, seed: int) -> TransformersEngine:
        """Return the embedded engine of the same settings, with the weights of a seed."""
        tokenizer, given = AutoTokenizer.from_pretrained(self.folder), dict(dtype=torch.float32, device=CPU)
        rollout, given["seed"] = self.config.rollout, self.config.run.seed
        engine = TransformersEngine(str(self.folder), tokenizer, rollout, **given)
        engine.load_weights(iter(self.weights(seed).items()), 1)
        return engine

    def load_again(self, seed: int, version: int, lost: Sequence[str]) -> None:
        """Wait until lost engines are back, and load the weights of a seed under a version that is already known."""
        self.engine.recover(lost)
        report = self.engine.load_weights(iter(self.weights(seed).items()), version)
        self.engine.take_report(version, report.failed, report.lost)

    def largest_gap(self, prompts: list[Prompt], samples: int = 4) -> float:
        """Return the largest gap of the engine's log-probs to the reference's."""
        return self.worst(self.engine.generate(prompts, samples))

    def gap(self, rollout: Rollout) -> np.ndarray:
        return gap_of(self.model, rollout, self.config.rollout.temperature)

    def worst(self, rollouts: Iterable[Rollout]) -> float:
        return max(self.gap(rollout).max() for rollout in rollouts)


def start_bench(folder: pathlib.Path, run_dir: pathlib.Path, *overrides: str, ranks: int = 1) -> Bench:
    """Start the engine as the first rank of a run of ``ranks`` on one host does; it has no weights yet."""
    config = config_of(folder, run_dir, *overrides)
    seat = RankLocation(rank=0, world_size=ranks, local_rank=0, local_world_size=ranks)
    model = hugging_face(folder)
    given = dict(location=seat, vocab_size=model.config.vocab_size, device=CPU, dtype=torch.float32)
    engine, _, _ = place_engine(config, AutoTokenizer.from_pretrained(folder), **given)
    return Bench(folder, config, engine, model)


@contextlib.contextmanager
def ready(started: Bench) -> Iterator[Bench]:
    """Wait until an engine is ready; end it with the block."""
    try:
        started.engine.recover(())
        yield started
    finally:
        started.engine.close()


def running(inputs: pathlib.Path, root: pathlib.Path, family: str, *overrides: str, tied: bool = True, ranks: int = 1):
    """Start an engine of a tiny model, which is ready in the block and ends with it."""
    folder = model_folder(inputs / "model", root / "model", family, tied=tied)
    return ready(start_bench(folder, root / "run", *overrides, ranks=ranks))


def sender_of(**changes) -> WeightSender:
    given = {"channel": "shared_memory", "bucket_bytes": 1 << 20, "deadline_s": DEADLINE_S, "device": CPU}
    return WeightSender(**given | changes)


def segments() -> list[pathlib.Path]:
    """Return the weight segments of this process that are left in shared memory."""
    return [path for folder in segment_folders() for path in folder.glob(f"{SEGMENT_PREFIX}{os.getpid()}-*")]


def segments_kept(bench: Bench) -> list[pathlib.Path]:
    """Return the segments that the engine's own sender keeps for its next sync."""
    return [buffer.segment.path for buffer in bench.engine._sync.buffers if buffer is not None]
