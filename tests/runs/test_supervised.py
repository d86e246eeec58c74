"""Checks the supervised start: its schedule, its held-out loss, its checkpoints, and its end by a signal."""

from __future__ import annotations

import math
import re

import pytest
import torch

from megatron_rl.checkpoint.folder import whole_checkpoints
from megatron_rl.cli import EXIT_CONFIG, EXIT_PREEMPTED
from tests.runs.command import arguments, command_line, rows_of, timeless, told_to_leave, weights_of_last

STEPS, WARMUP, LR, MIN_LR = 6, 1, 2e-3, 2e-4
GIVEN = (
    f"sft.steps={STEPS}",
    f"sft.lr={LR}",
    f"sft.min_lr={MIN_LR}",
    f"sft.warmup_steps={WARMUP}",
    "sft.schedule=cosine",
    "sft.samples_per_step=8",
    "sft.eval_every_steps=2",
    "sft.save_every_steps=2",
    "optimizer.schedule=constant",
)


def test_a_start_that_a_signal_ends_goes_on_bitwise(pool, arithmetic, tmp_path) -> None:
    """The step in progress is finished, all ranks leave with 75, and the same command gives the whole run's weights."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    given = (*GIVEN, "parallel.pipeline=2", "sft.eval_share=0.1", "checkpoint.save_every_rollouts=1")
    given = (*given, "train.num_rollouts=1")
    results = pool.run(2, command_line, arguments(arithmetic, whole, *given), timeout_s=120)
    assert [code for code, _ in results] == [0, 0], results

    results = pool.run(2, told_to_leave, arguments(arithmetic, parts, *given), 3, timeout_s=120)
    assert [code for code, _ in results] == [EXIT_PREEMPTED] * 2, results
    assert whole_checkpoints(parts / "checkpoints" / "supervised") == [2, 3]
    assert whole_checkpoints(parts / "checkpoints") == [] and len(rows_of(parts)) == 3
    results = pool.run(2, command_line, arguments(arithmetic, parts, *given), timeout_s=120)
    assert [code for code, _ in results] == [0, 0], results

    one, two = (weights_of_last(folder) for folder in (whole, parts))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert [timeless(row) for row in rows_of(whole)] == [timeless(row) for row in rows_of(parts)]
    for folder in (whole, parts):  # keep_last=2 later ones are there
        assert whole_checkpoints(folder / "checkpoints") == [0, 1]
        assert not (folder / "checkpoints" / "supervised").exists()


def test_rates_follow_the_schedule_and_the_held_out_loss_is_transformers(pool, arithmetic, tmp_path) -> None:
    """A run without RL: the last held-out loss is that of the exported weights under transformers."""
    held_out = arithmetic / "test.jsonl"
    given = (*GIVEN, f"sft.eval_path={held_out}", "train.num_rollouts=0")
    ((code, said), _) = pool.run(2, command_line, arguments(arithmetic, tmp_path, *given), timeout_s=120)
    assert code == 0, said
    rows = rows_of(tmp_path)
    rates = [LR / (WARMUP + 1), LR]
    for step in range(WARMUP + 1, STEPS):
        gone = (step - WARMUP) / (STEPS - WARMUP)
        rates.append(MIN_LR + (LR - MIN_LR) * (1 + math.cos(math.pi * gone)) / 2)
    assert [row["train/lr"] for row in rows] == pytest.approx(rates, rel=1e-12)
    evaluated = {row["step"]: row["sft/eval_loss"] for row in rows if "sft/eval_loss" in row}
    assert list(evaluated) == [2, 4, 6] and evaluated[6] < rows[0]["sft/eval_loss_before"]
    change = f"{rows[0]['sft/eval_loss_before']:.3f} → {evaluated[6]:.3f}"
    assert re.search(rf"held-out supervised loss +{change} +\(steps 0 → 6\)", said), said
    loss, tokens = transformers_loss(tmp_path / "checkpoints" / f"step_{STEPS}" / "hf", held_out)
    assert evaluated[6] == pytest.approx(loss, abs=1e-6) and rows[-1]["sft/eval_tokens"] == tokens


def transformers_loss(model_path, rows_path) -> tuple[float, int]:
    """Return the mean of −log π over the solutions' tokens and end, and their number, one row at a time."""
    import json

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_path), AutoTokenizer.from_pretrained(model_path)
    total, tokens = 0.0, 0
    for line in rows_path.read_text().splitlines():
        row = json.loads(line)
        prompt = tokenizer(row["prompt"], add_special_tokens=False).input_ids
        answer = [*tokenizer(row["solution"], add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].double()
        total -= logits.log_softmax(-1)[range(len(answer)), answer].sum().item()
        tokens += len(answer)
    return total / tokens, tokens


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("sft.eval_share=0.999",), "sft.eval_share=0.999 holds out 180 of 180 rows"),
        (("sft.eval_path=none.jsonl",), "sft.eval_path='none.jsonl' does not exist"),
        (("sft.eval_every_steps=2",), "nothing is held out"),
        (("sft.eval_share=0.1", "sft.eval_path=x.jsonl"), "give one of them"),
        (("sft.warmup_steps=3",), "sft.warmup_steps=3 must be below sft.steps=3"),
        (("sft.schedule=cosin",), "sft.schedule='cosin'"),
        (("sft.epochs=2",), "sft.steps=3 and sft.epochs=2: one of the two says how many steps there are"),
        (("data.messages_key=messages",), "data.messages_key='messages' names conversations"),
    ],
)
def test_settings_that_contradict_are_named(pool, arithmetic, tmp_path, given, message) -> None:
    ((code, said),) = pool.run(1, command_line, arguments(arithmetic, tmp_path, "sft.steps=3", *given), timeout_s=60)
    assert code == EXIT_CONFIG and message in said, said


def test_an_epoch_trains_every_row_once_and_starts_no_engine(pool, arithmetic, tmp_path) -> None:
    """180 rows less the 18 held out, 32 a step: two epochs are 11 steps; vLLM, which is not here, is not asked."""
    given = ("sft.steps=0", "sft.epochs=2", "sft.samples_per_step=32", "sft.eval_share=0.1", "train.num_rollouts=0")
    ((code, said),) = pool.run(
        1,
        command_line,
        arguments(arithmetic, tmp_path, *given, "rollout.engine=vllm", "run.deadline_s=700"),
        timeout_s=120,
    )
    assert code == 0, said
    assert [row["step"] for row in rows_of(tmp_path)] == list(range(1, 12))


def test_conversations_train_and_their_held_out_loss_is_transformers(pool, arithmetic, tmp_path) -> None:
    """A conversation's loss is on the assistant's tokens alone, of every turn; the file has no other column."""
    import json

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = tmp_path / "model"
    source = AutoModelForCausalLM.from_pretrained(arithmetic / "model")
    tokenizer = AutoTokenizer.from_pretrained(arithmetic / "model")
    end = tokenizer.eos_token
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}" + end + "{% else %}{{ m.content }}="
        "{% endif %}{% endfor %}"
    )
    source.save_pretrained(model)
    tokenizer.save_pretrained(model)
    rows = [
        [{"role": "user", "content": f"{a}+{b}"}, {"role": "assistant", "content": str(a + b)}]
        + [{"role": "user", "content": f"{b}+{a}"}, {"role": "assistant", "content": str(b + a)}]
        for a in range(8)
        for b in range(8)
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    given = ("sft.steps=6", "sft.samples_per_step=16", "sft.lr=3e-3", "train.num_rollouts=0", "parallel.pipeline=2")
    chat = ("data.template=chat", "data.messages_key=messages", f"sft.eval_path={path}", f"data.train={path}")
    every = arguments(arithmetic, tmp_path / "run", *given, *chat, f"model.hf_path={model}", "reward.functions=[]")
    results = pool.run(2, command_line, every, timeout_s=120)
    assert [code for code, _ in results] == [0, 0], results
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoints" / "step_6" / "hf")
    total = count = 0
    for row in rows:
        ids, own = [], []
        for message in row:
            tokens = tokenizer(message["content"], add_special_tokens=False).input_ids
            is_own = message["role"] == "assistant"
            ids += [*tokens, *([tokenizer.eos_token_id] if is_own else tokenizer("=").input_ids[:1])]
            own += [is_own] * (len(tokens) + 1)
        with torch.no_grad():
            logprobs = trained(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        for place in range(1, len(ids)):
            if own[place]:
                total, count = total - float(logprobs[place - 1, ids[place]]), count + 1
    last = rows_of(tmp_path / "run")[-1]
    assert last["sft/eval_tokens"] == count and last["sft/eval_loss"] == pytest.approx(total / count, abs=1e-5)
    assert last["sft/eval_loss"] < rows_of(tmp_path / "run")[0]["sft/eval_loss_before"]
