"""Checks tools/benchmarks/grpo_trl.py: TRL's trainer takes a run's prompts, in the run's order, and its settings."""

import json
import pathlib
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.data.templates import CHATML, tokenizer_of

pytest.importorskip("trl", reason="TRL is not installed; `make test-oracles` installs it")

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tools" / "benchmarks")]

import grpo_trl  # noqa: E402
import make_model  # noqa: E402

PROMPTS, SAMPLES, STEPS = 2, 4, 3


@pytest.fixture(scope="module")
def overrides(tmp_path_factory) -> list[str]:
    """Return overrides of examples/smollm2/grpo.yaml for a tiny model with random weights and eight rows."""
    folder = tmp_path_factory.mktemp("trl")
    tokenizer_of(CHATML).save_pretrained(folder / "tokenizer")
    sizes = ["--hidden", "64", "--layers", "1", "--heads", "2", "--kv-heads", "2", "--intermediate", "64"]
    places = ["--tokenizer", str(folder / "tokenizer"), "--out", str(folder / "model")]
    assert not make_model.main(["--family", "llama", *sizes, *places])
    rows = [{"prompt": [{"role": "user", "content": f"{i} + 1 = ?"}], "answer": str(i + 1)} for i in range(8)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return [
        f"model.hf_path={folder / 'model'}", f"data.train={folder / 'train.jsonl'}", "data.max_prompt_tokens=256",
        f"train.prompts_per_rollout={PROMPTS}", f"rollout.samples_per_prompt={SAMPLES}",
        "rollout.max_response_tokens=4", "optimizer.lr=1e-3",
    ]  # fmt: skip


def call(out: pathlib.Path, overrides: list[str], *options: str) -> int:
    fixed = ["--config", str(ROOT / "examples/smollm2/grpo.yaml"), "--out", str(out), "--steps", str(STEPS)]
    return grpo_trl.main([*fixed, "--microbatch-samples", "4", "--threads", "1", *options, *overrides])


def test_trl_trains_on_the_prompts_of_the_run(overrides: list[str], tmp_path: pathlib.Path, monkeypatch) -> None:
    """Each step has the rollout's prompts, a group each; a row says its mean reward; the saved weights have moved."""
    seen: list[tuple[str, float]] = []

    def first_token(prompts, completions, completion_ids, answer, **_) -> list[float]:
        rewards = [float(ids[0] % 2) for ids in completion_ids]
        seen.extend((prompt[-1]["content"], reward) for prompt, reward in zip(prompts, rewards, strict=True))
        return rewards

    monkeypatch.setattr(grpo_trl, "score", first_token)
    assert call(tmp_path / "run", overrides, "--precision", "float32", "--save-every", "3") == 0
    config = grpo_trl.load_config(str(ROOT / "examples/smollm2/grpo.yaml"), overrides)
    drawn = [prompt.columns["prompt"][0]["content"] for prompt in grpo_trl.draw_prompts(config, STEPS)]
    assert [prompt for prompt, _ in seen] == [prompt for prompt in drawn for _ in range(SAMPLES)]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = torch.tensor([reward for _, reward in seen]).reshape(STEPS, PROMPTS, SAMPLES)
    assert [row["reward/mean"] for row in rows] == pytest.approx(rewards.mean((1, 2)).tolist())
    equal = (rewards == rewards[..., :1]).all(-1).float().mean(-1)
    assert [row["signal/zero_advantage_ratio"] for row in rows] == pytest.approx(equal.tolist())
    assert all(row["time/step_s"] > row["time/rollout_s"] > 0 for row in rows) and rewards.std() > 0
    name = "model.layers.0.mlp.up_proj.weight"
    before = load_file(pathlib.Path(config.model.hf_path) / "model.safetensors")[name]
    assert not torch.equal(load_file(tmp_path / "run" / "step_3" / "model.safetensors")[name], before)


REFUSALS = {
    "lora.rank=4": "lora.rank=4 is not carried over to TRL here; set lora.rank=null",
    "advantage.estimator=rloo": "advantage.estimator=rloo is not carried over",
    "rollout.samples_per_prompt=3": "--microbatch-samples 4 times 1 processes must divide the 6 samples a step",
}


@pytest.mark.parametrize("override", REFUSALS)
def test_what_trl_would_not_follow_is_refused(overrides: list[str], tmp_path, capsys, override: str) -> None:
    assert call(tmp_path / "run", [*overrides, override]) == 2 and REFUSALS[override] in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
