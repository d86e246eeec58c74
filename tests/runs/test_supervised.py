"""Checks the supervised start: its schedule, its held-out loss, its checkpoints, and its end by a signal."""

import json
import math
import pathlib
import re
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_rl.checkpoint.folder import whole_checkpoints
from megatron_rl.cli import EXIT_PREEMPTED
from megatron_rl.observability.run_status import read_status
from tests.runs.command import assert_same_run, rows_of, told_to_leave

STEPS, WARMUP, LR, MIN_LR = 6, 1, 2e-3, 2e-4
GIVEN = (f"sft.steps={STEPS}", f"sft.lr={LR}", f"sft.min_lr={MIN_LR}", f"sft.warmup_steps={WARMUP}",
         "sft.schedule=cosine", "sft.samples_per_step=8", "sft.eval_every_steps=2", "sft.save_every_steps=2",
         "optimizer.schedule=constant")
CHAT = ("{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}END{% else %}{{ m.content }}="
        "{% endif %}{% endfor %}")


def test_a_start_that_a_signal_ends_goes_on_bitwise(made, tmp_path) -> None:
    """The step in progress is finished, all ranks leave with 75, and the same command gives the whole run's weights."""
    rest = ("parallel.pipeline=2", "sft.eval_share=0.1", "checkpoint.save_every_rollouts=1", "train.num_rollouts=1")
    whole = made(2, *GIVEN, *rest)
    made.into(tmp_path, 2, *GIVEN, *rest, run=told_to_leave, more=(3,), code=EXIT_PREEMPTED)
    assert whole_checkpoints(tmp_path / "checkpoints" / "supervised") == [2, 3]
    assert whole_checkpoints(tmp_path / "checkpoints") == [] and len(rows_of(tmp_path)) == 3
    status = read_status(tmp_path)
    assert (status.state, status.total_steps) == ("preempted", len(rows_of(whole)))
    said, _ = made.into(tmp_path, 2, *GIVEN, *rest)
    assert f"warmup step 4 (4/{status.total_steps}) | loss " in said and read_status(tmp_path).state == "ended"
    assert_same_run(whole, tmp_path)
    for folder in (whole, tmp_path):  # keep_last=2 later ones are there
        assert whole_checkpoints(folder / "checkpoints") == [0, 1]
        assert not (folder / "checkpoints" / "supervised").exists()


def test_rates_follow_the_schedule_and_the_held_out_loss_is_transformers(made, arithmetic, tmp_path) -> None:
    """A run without RL: the last held-out loss is that of the exported weights under transformers."""
    held_out = arithmetic / "test.jsonl"
    said, _ = made.into(tmp_path, 2, *GIVEN, f"sft.eval_path={held_out}", "train.num_rollouts=0")
    rows = rows_of(tmp_path)
    first = f"loss {rows[0]['train/loss']:.4g} | held out {rows[0]['sft/eval_loss_before']:.4g} | lr 0.001 | "
    assert f"sft step 1 (1/6) | {first}{rows[0]['perf/tokens_per_second']:,.0f} tokens/s | " in said, said
    for row in rows:  # the tokens of the update are all that the step has
        tokens = row["time/update_s"] * row["perf/dense_equivalent_tokens_per_second"]
        assert row["time/step_s"] * row["perf/tokens_per_second"] == pytest.approx(tokens, rel=1e-9)
    rates = [LR / (WARMUP + 1), LR]
    for step in range(WARMUP + 1, STEPS):
        gone = (step - WARMUP) / (STEPS - WARMUP)
        rates.append(MIN_LR + (LR - MIN_LR) * (1 + math.cos(math.pi * gone)) / 2)
    assert [row["train/lr"] for row in rows] == pytest.approx(rates, rel=1e-12)
    evaluated = {row["step"]: row["sft/eval_loss"] for row in rows if "sft/eval_loss" in row}
    assert list(evaluated) == [2, 4, 6] and evaluated[6] < rows[0]["sft/eval_loss_before"]
    change = f"{rows[0]['sft/eval_loss_before']:.3f} → {evaluated[6]:.3f}"
    assert re.search(rf"held-out supervised loss +{change} +\(steps 0 → 6\)", said), said
    tokenizer, episodes = AutoTokenizer.from_pretrained(arithmetic / "model"), []
    for row in map(json.loads, held_out.read_text().splitlines()):
        episodes.append([(encoded(tokenizer, row["prompt"]), False), (answer_of(tokenizer, row["solution"]), True)])
    loss, tokens = transformers_loss(tmp_path, episodes)
    assert evaluated[6] == pytest.approx(loss, abs=1e-6) and rows[-1]["sft/eval_tokens"] == tokens


def encoded(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


def answer_of(tokenizer, text: str) -> list[int]:
    return [*encoded(tokenizer, text), tokenizer.eos_token_id]


def transformers_loss(run_dir: pathlib.Path, episodes: list[list[tuple[list[int], bool]]]) -> tuple[float, int]:
    """Return the mean of −log π over the model's own tokens, and their number. A part: its tokens, whether own."""
    model = AutoModelForCausalLM.from_pretrained(run_dir / "checkpoints" / f"step_{STEPS}" / "hf")
    total, count = 0.0, 0
    for parts in episodes:
        ids = [token for tokens, _ in parts for token in tokens]
        own = [is_own for tokens, is_own in parts for _ in tokens]
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        places = [place for place in range(1, len(ids)) if own[place]]
        total -= sum(float(logprobs[place - 1, ids[place]]) for place in places)
        count += len(places)
    return total / count, count


def test_an_epoch_trains_every_row_once_and_starts_no_engine(made) -> None:
    """180 rows less the 18 held out, 32 a step: two epochs are 11 steps; vLLM, which is not here, is not asked."""
    given = ("sft.steps=0", "sft.epochs=2", "sft.samples_per_step=32", "sft.eval_share=0.1", "train.num_rollouts=0")
    run = made(1, *given, "rollout.engine=vllm", "run.deadline_s=700")
    assert [row["step"] for row in rows_of(run)] == list(range(1, 12))


def test_conversations_train_and_their_held_out_loss_is_transformers(made, arithmetic, tmp_path) -> None:
    """A conversation's loss is on the assistant's tokens alone, of every turn; the file has no other column."""
    shutil.copytree(arithmetic / "model", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(arithmetic / "model")
    tokenizer.chat_template = CHAT.replace("END", tokenizer.eos_token)
    tokenizer.save_pretrained(tmp_path / "model")
    path = tmp_path / "chats.jsonl"
    rows = [[(f"{a}+{b}", a + b), (f"{b}+{a}", b + a)] for a in range(8) for b in range(8)]
    with path.open("w") as file:
        for row in rows:
            turns = [[{"role": "user", "content": q}, {"role": "assistant", "content": str(a)}] for q, a in row]
            file.write(json.dumps({"messages": sum(turns, [])}) + "\n")
    given = (f"sft.steps={STEPS}", "sft.samples_per_step=16", "sft.lr=3e-3", "train.num_rollouts=0")
    chat = ("data.template=chat", "data.messages_key=messages", f"sft.eval_path={path}", f"data.train={path}")
    run = made(2, "parallel.pipeline=2", "reward.functions=[]", *given, *chat, f"model.hf_path={tmp_path / 'model'}")
    episodes = [
        [part for q, a in row for part in ((encoded(tokenizer, f"{q}="), False), (answer_of(tokenizer, str(a)), True))]
        for row in rows
    ]
    loss, tokens = transformers_loss(run, episodes)
    first, *_, last = rows_of(run)
    assert last["sft/eval_tokens"] == tokens and last["sft/eval_loss"] == pytest.approx(loss, abs=1e-5)
    assert last["sft/eval_loss"] < first["sft/eval_loss_before"]
