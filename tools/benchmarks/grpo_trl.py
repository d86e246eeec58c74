"""Runs a megatron_rl config by TRL's GRPOTrainer: same model, reward and settings, the prompts in the same order.

    python tools/benchmarks/grpo_trl.py --config examples/smollm2/grpo.yaml --out runs/trl --steps 40 \\
        model.hf_path=runs/smollm2/inputs/model data.train=runs/smollm2/inputs/data/train.jsonl

One process and --threads threads, or, under torchrun, TRL's own data parallelism over processes of so many threads
each. DIR/metrics.jsonl gets a row for each step, under megatron_rl's names where both mean
the same: rollout and step, seconds of the rollout, of the rewards and of the whole step, mean reward, share of the
samples whose group has equal rewards. The first prompts' token ids are held against megatron_rl's before anything is
timed. --save-every writes Hugging Face directories, outside of the times; an evaluation of one is
`train.num_rollouts=0 model.hf_path=DIR/step_K` under megatron_rl. tools/benchmarks/update.py --model compares the two
sides' gradients on one batch.

Read: model, data, rollout, reward (math_verify alone), advantage.estimator=grpo, loss.policy=ppo with token_mean,
optimizer, run.seed. A setting that TRL would not follow is refused.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time
from collections.abc import Sequence

from update_trl import TrlMissing, load_trl

from megatron_rl.config import Config, load_config
from megatron_rl.errors import ConfigError

GENERATION = ("transformers", "continuous", "vllm")
PRECISION = ("float32", "autocast", "bfloat16")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python tools/benchmarks/grpo_trl.py --config examples/smollm2/grpo.yaml --out runs/trl "
        "--steps 30 --save-every 10 model.hf_path=MODEL data.train=TRAIN.jsonl",
    )
    parser.add_argument("--config", required=True, help="YAML file of megatron_rl")
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR", help="must not exist or be empty")
    parser.add_argument("--steps", type=int, required=True, help="optimizer steps, one a rollout")
    parser.add_argument("--save-every", type=int, metavar="N", help="write the model every N steps")
    parser.add_argument(
        "--microbatch-samples", type=int, default=8, help="per_device_train_batch_size; gradients accumulate"
    )
    parser.add_argument(
        "--precision",
        choices=PRECISION,
        default="autocast",
        help="float32; autocast: GRPOConfig(bf16=True), float32 weights; bfloat16: weights too, which rounds the steps",
    )
    parser.add_argument(
        "--generation",
        choices=GENERATION,
        default="transformers",
        help="generate, continuous batching, or vLLM in the same process (vllm_mode=colocate)",
    )
    parser.add_argument("--checkpointing", action="store_true", help="gradient_checkpointing, GRPOConfig's default")
    parser.add_argument("--threads", type=int, default=2, help="torch's CPU threads")
    parser.add_argument("overrides", nargs="*", help="section.key=value, as for megatron_rl.train")
    return parser.parse_args(arguments)


def refuse_unlike(config: Config) -> None:
    """Raise ConfigError on a setting of megatron_rl that this comparison would not carry over."""
    wanted = {
        "advantage.estimator": (config.advantage.estimator, "grpo"),
        "loss.policy": (config.loss.policy, "ppo"),
        "loss.reduction": (config.loss.reduction, "token_mean"),
        "loss.kl_coefficient": (config.loss.kl_coefficient, 0.0),
        "loss.entropy_coefficient": (config.loss.entropy_coefficient, 0.0),
        "reward.functions": (list(config.reward.functions), ["math_verify"]),
        "data.template": (config.data.template, "chat"),
        "optimizer.schedule": (config.optimizer.schedule, "constant"),
        "optimizer.warmup_steps": (config.optimizer.warmup_steps, 0),
        "lora.rank": (config.lora.rank, None),
    }
    for key, (value, needed) in wanted.items():
        if value != needed:
            raise ConfigError(f"{key}={value} is not carried over to TRL here; set {key}={json.dumps(needed)}")


def num_processes() -> int:
    """Return the processes that torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def draw_prompts(config: Config, steps: int) -> list:
    """Return the prompts that a run of ``steps`` rollouts of megatron_rl draws, in its order."""
    from transformers import AutoConfig

    from megatron_rl.data.prompt_dataset import PromptDataset
    from megatron_rl.data.rows import load_rows
    from megatron_rl.data.tokenizer import load_tokenizer

    vocab_size = AutoConfig.from_pretrained(config.model.hf_path).vocab_size
    tokenizer = load_tokenizer(config.model, vocab_size)
    dataset = PromptDataset(
        load_rows(config.data.train), tokenizer, config.data, config.run.seed, vocab_size=vocab_size
    )
    return dataset.next(steps * config.train.prompts_per_rollout)


def rows_of(prompts: Sequence, config: Config) -> list[dict]:
    """Return TRL's rows: messages, the system prompt first, and the answer."""
    system = [{"role": "system", "content": config.data.system_prompt}] if config.data.system_prompt else []
    return [
        {"prompt": [*system, *prompt.columns[config.data.prompt_key]], "answer": str(prompt.columns["answer"])}
        for prompt in prompts
    ]


def score(prompts, completions, completion_ids, answer, **_) -> list[float]:
    """Score TRL's completions, each a list of one message, by megatron_rl's math_verify."""
    from megatron_rl.reward.math import math_verify

    texts = [completion[0]["content"] for completion in completions]
    return math_verify(prompts=texts, completions=texts, completion_ids=completion_ids, answer=answer)


def trl_settings(config: Config, given: argparse.Namespace) -> dict:
    """Return GRPOConfig's arguments for what the config says."""
    samples, processes = config.train.prompts_per_rollout * config.rollout.samples_per_prompt, num_processes()
    if samples % (given.microbatch_samples * processes):
        raise ConfigError(
            f"--microbatch-samples {given.microbatch_samples} times {processes} processes must divide the {samples} "
            "samples a step"
        )
    return {
        "output_dir": str(given.out / "trl"),
        "max_steps": given.steps,
        "per_device_train_batch_size": given.microbatch_samples,
        "gradient_accumulation_steps": samples // given.microbatch_samples // processes,
        "num_generations": config.rollout.samples_per_prompt,
        "max_completion_length": config.rollout.max_response_tokens,
        "temperature": config.rollout.temperature,
        "shuffle_dataset": False,  # the rows are in megatron_rl's order
        "loss_type": "dapo",  # the mean over the batch's tokens
        "scale_rewards": "group",
        "beta": 0.0,
        "epsilon": config.loss.clip_low,
        "epsilon_high": config.loss.clip_high,
        "learning_rate": config.optimizer.lr,
        "lr_scheduler_type": "constant",
        "adam_beta1": config.optimizer.betas[0],
        "adam_beta2": config.optimizer.betas[1],
        "adam_epsilon": config.optimizer.epsilon,
        "weight_decay": config.optimizer.weight_decay,
        "max_grad_norm": config.optimizer.clip_grad,
        "seed": config.run.seed,
        "bf16": given.precision == "autocast",
        "gradient_checkpointing": given.checkpointing,
        "use_transformers_continuous_batching": given.generation == "continuous",
        "use_vllm": given.generation == "vllm",
        "vllm_mode": "colocate",
        "vllm_max_model_length": config.data.max_prompt_tokens + config.rollout.max_response_tokens,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
    }


class Recorder:
    """Times a trainer's rollouts and steps and writes a row for each step."""

    def __init__(self, trainer, out: pathlib.Path, save_every: int | None) -> None:
        self.trainer, self.out, self.save_every = trainer, out, save_every
        self.seconds = {"rollout": 0.0, "reward": 0.0}
        self.rewards: list[float] = []
        self.began = 0.0
        self._time("_generate", "rollout")
        self._time("_calculate_rewards", "reward")
        trainer.add_callback(self.callback())

    def _time(self, method: str, name: str) -> None:
        original = getattr(self.trainer, method)

        def timed(*args, **kwargs):
            began = time.perf_counter()
            result = original(*args, **kwargs)
            self.seconds[name] += time.perf_counter() - began
            if name == "reward":
                self.rewards = result.sum(-1).tolist()
            return result

        setattr(self.trainer, method, timed)

    def callback(self):
        """Return the TrainerCallback that calls this recorder at the start and the end of a step."""
        from transformers import TrainerCallback

        recorder = self

        class AtStep(TrainerCallback):
            def on_train_begin(self, args, state, control, **_):
                recorder.began = time.perf_counter()

            def on_step_end(self, args, state, control, **_):
                recorder.end_step(state.global_step)

        return AtStep()

    def end_step(self, step: int) -> None:
        """Write the step's row, save the model where it is due, and start the next step's clock."""
        if self.trainer.accelerator.is_main_process:
            self._record(step)
        self.trainer.accelerator.wait_for_everyone()
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        self.began = time.perf_counter()

    def _record(self, step: int) -> None:
        size = self.trainer.num_generations
        groups = [self.rewards[i : i + size] for i in range(0, len(self.rewards), size)]
        row = {
            "step": step,
            "time/step_s": time.perf_counter() - self.began,
            **{f"time/{name}_s": seconds for name, seconds in self.seconds.items()},
            "reward/mean": sum(self.rewards) / len(self.rewards),
            "signal/zero_advantage_ratio": sum(len(set(group)) == 1 for group in groups) / len(groups),
        }
        with (self.out / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(
            f"TRL step {step} | reward {row['reward/mean']:.3f} | {row['time/step_s']:.1f} s, "
            f"rollout {row['time/rollout_s']:.1f} s",
            flush=True,
        )
        if self.save_every and step % self.save_every == 0:
            folder = self.out / f"step_{step}"
            self.trainer.accelerator.unwrap_model(self.trainer.model).save_pretrained(folder)
            self.trainer.processing_class.save_pretrained(folder)


def check_prompts(trainer, prompts: Sequence, rows: Sequence[dict]) -> None:
    """Raise ConfigError unless TRL makes the token ids of megatron_rl's prompts."""
    token_ids = trainer._tokenize_prompts([row["prompt"] for row in rows])[0]
    for prompt, found in zip(prompts, token_ids, strict=True):
        if list(found) != list(prompt.token_ids):
            raise ConfigError(
                f"prompt {prompt.prompt_id}: TRL makes the tokens {list(found)}, megatron_rl {list(prompt.token_ids)}"
            )


def run(given: argparse.Namespace) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trl = load_trl()
    from datasets import Dataset

    torch.set_num_threads(given.threads)
    config = load_config(given.config, given.overrides)
    refuse_unlike(config)
    settings = trl_settings(config, given)
    if os.environ.get("RANK", "0") == "0" and given.out.exists() and any(given.out.iterdir()):
        raise ConfigError(f"--out {given.out} is not empty; name another folder")
    given.out.mkdir(parents=True, exist_ok=True)
    prompts = draw_prompts(config, given.steps)
    rows = rows_of(prompts, config)
    dtype = torch.bfloat16 if given.precision == "bfloat16" else torch.float32
    tokenizer = AutoTokenizer.from_pretrained(config.model.hf_path)
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(config.model.hf_path, dtype=dtype),
        args=trl.GRPOConfig(**settings),
        reward_funcs=score,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
    )
    size = config.train.prompts_per_rollout
    check_prompts(trainer, prompts[:size], rows[:size])
    Recorder(trainer, given.out, given.save_every)
    trainer.train()


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    try:
        run(given)
    except (TrlMissing, ConfigError) as error:
        print(f"grpo_trl.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
