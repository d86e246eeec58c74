"""Whole runs with an environment through the command line.

They are tried on layouts, skip and dense, ahead, resumed, evaluated, imitated, and failing.
"""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch

from megatron_rl.environment import Step
from megatron_rl.environment.gymnasium_adapter import rows
from tests.pairwise import quick
from tests.runs.command import arguments, command_line, rows_of, timeless, weights_of

LAYOUTS = {"DP2": (2, ()), "TP2-PP2": (4, ("parallel.tensor=2", "parallel.pipeline=2"))}
TURNS = (
    "environment.name=tests.runs.test_turn_runs:Riddle",
    "environment.max_turns=3",
    "rollout.max_response_tokens=24",
    "reward.functions=[environment,tests.reward_functions:parity]",
    "reward.weights=[1.0,0.5]",
    "optimizer.schedule=constant",
    "sft.steps=20",  # on short answers: turns end soon
)


class Riddle:
    """An environment that tells how long the turn was, and goes on after a turn of an even number of characters."""

    breaks = False

    def __init__(self, end: str = " ") -> None:
        self.end = end

    def reset(self, prompt) -> None:
        if prompt.columns["prompt"] == "7+5=" and self.breaks:
            raise RuntimeError("a riddle without an answer")

    def step(self, action: str) -> Step:
        return Step(observation=f"={len(action)}{self.end}", reward=len(action) / 8, done=len(action) % 2 == 1)


class Breaking(Riddle):
    breaks = True


class Echo:
    """Has gymnasium's methods, answers with the text and a space, and ends after two."""

    class action_space:  # gymnasium's name
        contains = staticmethod(lambda text: bool(text))

    def reset(self, *, seed=None, options=None):
        self.left = 2
        return f"{seed}+1=", {}

    def step(self, action):
        self.left -= 1
        return f"={len(action)} ", 0.25, self.left == 0, False, {}

    def close(self) -> None: ...


def as_it_is(text: str) -> str:
    return text


def end_of(pool, ranks: int, given: list[str]) -> None:
    results = pool.run(ranks, command_line, given, timeout_s=120)
    assert [code for code, _ in results] == [0] * ranks, results


@pytest.mark.parametrize("layout", quick(LAYOUTS, "TP2-PP2"))
def test_a_layouts_run_equals_one_processs(pool, arithmetic, tmp_path, layout):
    """A layout's run equals one process's, and repeats to the bit on the same layout.

    Episodes, rewards and turns are the same; weights agree to rounding.
    """
    world, degrees = LAYOUTS[layout]
    found = []
    folders = [(1, (), "alone"), (world, degrees, "one"), (world, degrees, "other")]
    for ranks, extra, name in folders:
        end_of(pool, ranks, arguments(arithmetic, tmp_path / name, *TURNS, *extra, "train.num_rollouts=3"))
        rows = [row for row in rows_of(tmp_path / name) if "reward/mean" in row]
        keys = (
            "reward/mean",
            "reward/environment",
            "rollout/turns_mean",
            "rollout/tokens",
            "rollout/response_tokens_mean",
        )
        found.append(([[row[key] for key in keys] for row in rows], weights_of(tmp_path / name)))
    (alone, weights), (one, first), (other, second) = found
    print(alone)
    assert alone == one == other and all(row[2] > 1.1 and row[3] < 32 * row[4] for row in alone)
    assert all(torch.equal(first[name], second[name]) for name in first)
    difference = math.sqrt(sum(((weights[name] - first[name]).double() ** 2).sum().item() for name in weights))
    assert difference / math.sqrt(sum((weights[name].double() ** 2).sum().item() for name in weights)) < 1e-5


def test_skip_equals_dense(pool, arithmetic, tmp_path):
    """With importance weights the skip run equals the dense one to the bit, where nothing is repacked.

    The tokens with loss are the sampled ones.
    """
    cut = ("plan.repack=false", "plan.samples_per_microbatch=2", "correction.mode=token_mask", "correction.cap=1.5")
    for mode in ("exact", "off"):
        end_of(pool, 2, arguments(arithmetic, tmp_path / mode, *TURNS, *cut, f"skip.mode={mode}"))
    exact, off = weights_of(tmp_path / "exact"), weights_of(tmp_path / "off")
    assert all(torch.equal(exact[name], off[name]) for name in off)
    trace = [json.loads(line) for line in (tmp_path / "exact" / "trace.jsonl").read_text().splitlines()]
    firsts = [row for row in rows_of(tmp_path / "exact") if "rollout/tokens" in row]
    assert [sum(line["loss_tokens"]) for line in trace] == [row["rollout/tokens"] for row in firsts]
    assert all(sum(line["loss_tokens"]) < sum(line["response_tokens"]) for line in trace)


def test_a_run_ahead_that_goes_on_from_a_checkpoint_equals_the_whole_one(pool, arithmetic, tmp_path):
    """A run ahead that goes on from a checkpoint equals the whole one.

    The rollouts ahead and the replayed groups in a checkpoint have their masks and their environment's rewards.
    """
    given = (
        *TURNS,
        "checkpoint.save_every_rollouts=1",
        "checkpoint.keep_last=null",
        "rollout.producer.mode=streaming",
        "rollout.producer.prefetch_rollouts=1",
        "rollout.producer.min_groups=4",
        "correction.mode=token_truncate",
        "replay.capacity_groups=6",
        "replay.max_uses=2",
        "train.num_rollouts=5",
        "reward.functions=[tests.reward_functions:mostly_dead,environment]",
        "reward.weights=[1.0,0.25]",
        "environment.arguments={}",
    )
    whole, part = tmp_path / "whole", tmp_path / "part"
    end_of(pool, 2, arguments(arithmetic, whole, *given))
    shutil.copytree(whole, part)
    for iteration in range(3, 6):
        shutil.rmtree(part / "checkpoints" / f"iter_{iteration:07d}")
    (exported,) = (part / "checkpoints").glob("step_*")
    (exported / "hf" / "of_before").touch()
    end_of(pool, 2, arguments(arithmetic, part, *given))
    assert [timeless(x) for x in rows_of(whole)] == [timeless(x) for x in rows_of(part)]
    assert (exported.with_name(f"stale_{exported.name}") / "hf" / "of_before").exists()
    assert not (exported / "hf" / "of_before").exists()
    one, two = weights_of(whole), weights_of(part)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert (whole / "trace.jsonl").read_text() == (part / "trace.jsonl").read_text()


CHAT = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<|endoftext|>{% endif %}{% endfor %}{% if "
    "add_generation_prompt %} {% endif %}"
)


def test_a_run_of_chat_messages(pool, arithmetic, tmp_path):
    """A run of chat messages equals one of a plain template that writes the same.

    Prompts and imitated episodes are messages, and the template writes the observations.
    """
    shutil.copytree(arithmetic / "model", tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(CHAT)
    rows = [json.loads(line) for line in (arithmetic / "train.jsonl").read_text().splitlines()]
    for name, said in (("plain", " 4 "), ("chat", " 4")):
        made = []
        for row in rows:
            turns = [("assistant", row["answer"]), ("user", said), ("assistant", "4")]
            asked = (
                [{"role": "system", "content": "="}, {"role": "user", "content": row["prompt"]}]
                if name == "chat"
                else row["prompt"]
            )
            made.append({**row, "prompt": asked, "solution": [{"role": role, "content": text} for role, text in turns]})
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    found = []
    for name, extra in (
        ("plain", ("data.template='={prompt} '",)),
        ("chat", ("data.template=chat", "environment.role=user")),
    ):
        given = (
            *TURNS,
            f"model.hf_path={tmp_path / 'model'}",
            f"data.train={tmp_path / name}.jsonl",
            *extra,
            "reward.functions=[environment]",
            "reward.weights=[1.0]",
            f"environment.arguments={{end: '{' ' * (name == 'plain')}'}}",
        )
        end_of(pool, 2, arguments(arithmetic, tmp_path / name, *given))
        found.append((weights_of(tmp_path / name), rows_of(tmp_path / name)))
    (weights, logged), (other, other_logged) = found
    assert all(torch.equal(weights[name], other[name]) for name in weights)
    assert [timeless(row) for row in logged] == [timeless(row) for row in other_logged]
    assert [row["rollout/turns_mean"] > 1.1 for row in logged if "rollout/turns_mean" in row] == [True] * 2


def test_evaluation_has_environments_too(pool, arithmetic, tmp_path):
    given = (*TURNS, f"eval.path={arithmetic / 'test.jsonl'}", "eval.temperature=0.7", "eval.samples_per_prompt=2")
    end_of(pool, 1, arguments(arithmetic, tmp_path, *given))
    (first, last) = [row for row in rows_of(tmp_path) if any(key.startswith("eval/") for key in row)]
    assert first["eval/test/environment"] > 0 and last["eval/test/environment"] > 0 and first["phase"] == "warmup"


@pytest.mark.parametrize(("on_error", "code"), [("fail", 1), ("drop", 0)])
def test_an_environment_that_fails_ends_the_run_or_costs_its_group(pool, arithmetic, tmp_path, on_error, code):
    rows = [json.loads(line) for line in (arithmetic / "train.jsonl").read_text().splitlines()]
    data = tmp_path / "train.jsonl"
    broken = next(row for row in rows if row["prompt"] == "7+5=")
    others = [row for row in rows if row != broken][:7]
    data.write_text("".join(json.dumps(row) + "\n" for row in [*others, broken]))
    given = arguments(
        arithmetic,
        tmp_path / "run",
        *TURNS,
        f"data.train={data}",
        "train.num_rollouts=1",
        "environment.name=tests.runs.test_turn_runs:Breaking",
        f"environment.on_error={on_error}",
    )
    results = pool.run(2, command_line, given, timeout_s=120)
    assert [found for found, _ in results] == [code] * 2, results
    if code:
        assert any(
            "a riddle without an answer" in said and "environment.on_error=drop" in said for _, said in results
        ), results
    else:
        (first, *_) = [row for row in rows_of(tmp_path / "run") if row["phase"] == "rl"]
        assert first["reward/excluded"] == 4.0


def test_relations_that_cannot_work_are_refused(pool, arithmetic, tmp_path):
    for extra, words in (
        (("environment.name=null",), "environment.name is null; name one"),
        (("environment.deadline_s=60",), "environment.deadline_s=60 must be below run.deadline_s=60"),
    ):
        ((code, said),) = pool.run(1, command_line, arguments(arithmetic, tmp_path, *TURNS, *extra), timeout_s=60)
        assert code == 2 and words in said, said


def test_an_environment_of_gymnasiums_kind_in_a_whole_run(pool, arithmetic, tmp_path):
    """Prompts that ``rows`` wrote are trained on, with two turns and a quarter for each where none was cut off."""
    given = {"env": "tests.runs.test_turn_runs:Echo", "action": "tests.runs.test_turn_runs:as_it_is"}
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f"{json.dumps(row | {'answer': '0'})}\n" for row in rows(**given, seeds=range(16))))
    overrides = (
        f"data.train={data}",
        "environment.name=gymnasium",
        f"environment.arguments={json.dumps(given)}",
        "rollout.max_response_tokens=40",
        "reward.functions=[environment]",
    )
    end_of(pool, 1, arguments(arithmetic, tmp_path / "run", *overrides))
    logged = [row for row in rows_of(tmp_path / "run") if "reward/environment" in row]
    assert len(logged) == 2
    for row in logged:
        assert 1.0 < row["rollout/turns_mean"] <= 2.0 and 0.0 < row["reward/environment"] <= 0.5
        whole = 1.0 - row["rollout/truncated_share"]
        assert row["reward/environment"] >= 0.5 * whole
