"""Whole runs with an environment: on layouts, skip and dense, ahead, resumed, evaluated, imitated, and failing."""

import json
import shutil

import pytest

from megatron_rl.environment import Step
from megatron_rl.environment.gymnasium_adapter import rows
from tests.pairwise import quick
from tests.runs.command import SAVED, apart, assert_same_run, firsts_of, rows_of, same_tensors, weights_of

LAYOUTS = {"DP2": (2, ()), "TP2-PP2": (4, ("parallel.tensor=2", "parallel.pipeline=2"))}
TURNS = (
    "environment.name=tests.runs.test_turn_runs:Riddle", "environment.max_turns=3", "rollout.max_response_tokens=24",
    "reward.functions=[environment,tests.reward_functions:parity]", "reward.weights=[1.0,0.5]",
    "optimizer.schedule=constant",
    *("sft.steps=8", "sft.samples_per_step=8"),  # on short answers: turns end soon
)
CHAT = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content }}<|endoftext|>{% else %}{{ m.content }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ ' ' }}{% endif %}"
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


@pytest.mark.parametrize("layout", quick(LAYOUTS, "DP2"))
def test_a_layouts_run_equals_one_processs(made, layout):
    """A layout's run equals one process's: episodes, rewards and turns are the same, weights to rounding."""
    world, degrees = LAYOUTS[layout]
    alone, run = made(1, *TURNS), made(world, *TURNS, *degrees)
    keys = ("reward/mean", "reward/environment", "rollout/turns_mean", "rollout/tokens", "rollout/response_tokens_mean")
    found, other = ([[row[key] for key in keys] for row in firsts_of(each)] for each in (alone, run))
    assert found == other and all(row[2] > 1.1 and row[3] < 32 * row[4] for row in found)
    assert apart(alone, run) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_repeats_to_the_bit(made, tmp_path, layout):
    world, degrees = LAYOUTS[layout]
    made.into(tmp_path, world, *TURNS, *degrees)
    assert_same_run(made(world, *TURNS, *degrees), tmp_path)


def test_skip_equals_dense(made):
    """They are equal to the bit, where nothing is repacked. The tokens with loss are the sampled ones."""
    cut = ("plan.repack=false", "plan.samples_per_microbatch=2", "correction.mode=token_mask", "correction.cap=1.5")
    once = "train.num_rollouts=1"
    exact, off = (made(2, *TURNS, *cut, once, f"skip.mode={mode}") for mode in ("exact", "off"))
    assert same_tensors(weights_of(exact), weights_of(off))
    trace = [json.loads(line) for line in (exact / "trace.jsonl").read_text().splitlines()]
    tokens = [row["rollout/tokens"] for row in firsts_of(exact, "rollout/tokens")]
    assert [sum(line["loss_tokens"]) for line in trace] == tokens
    assert all(sum(line["loss_tokens"]) < sum(line["response_tokens"]) for line in trace)


@pytest.mark.long
def test_a_run_ahead_that_goes_on_from_a_checkpoint_equals_the_whole_one(made, tmp_path):
    """Rollouts ahead and replayed groups keep masks and environment's rewards; the export of before is put aside."""
    given = (*TURNS, *SAVED, "rollout.producer.mode=streaming", "rollout.producer.prefetch_rollouts=1",
             "rollout.producer.min_groups=4", "correction.mode=token_truncate", "replay.capacity_groups=6",
             "replay.max_uses=2", "train.num_rollouts=4", "reward.weights=[1.0,0.25]",
             "reward.functions=[tests.reward_functions:mostly_dead,environment]")
    whole, part = made(2, *given), tmp_path / "part"
    shutil.copytree(whole, part)
    for iteration in (3, 4):
        shutil.rmtree(part / "checkpoints" / f"iter_{iteration:07d}")
    (exported,) = (part / "checkpoints").glob("step_*")
    (exported / "hf" / "of_before").touch()
    made.into(part, 2, *given)
    assert_same_run(whole, part)
    assert (exported.with_name(f"stale_{exported.name}") / "hf" / "of_before").exists()
    assert not (exported / "hf" / "of_before").exists()


def messages(*said: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in said]


def test_a_run_of_chat_messages(made, arithmetic, tmp_path):
    """A template that writes messages trains what a plain one that writes the same trains."""
    shutil.copytree(arithmetic / "model", tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(CHAT)
    rows = [json.loads(line) for line in (arithmetic / "train.jsonl").read_text().splitlines()]
    for name, said in (("plain", " 4 "), ("chat", " 4")):
        with (tmp_path / f"{name}.jsonl").open("w") as file:
            for row in rows:
                turns = [("assistant", row["answer"]), ("user", said), ("assistant", "4")]
                asked = messages(("system", "="), ("user", row["prompt"])) if name == "chat" else row["prompt"]
                file.write(json.dumps({**row, "prompt": asked, "solution": messages(*turns)}) + "\n")
    common = (*TURNS, f"model.hf_path={tmp_path / 'model'}", "reward.functions=[environment]", "reward.weights=[1.0]")
    common += ("train.num_rollouts=1",)
    ways = {"plain": ("data.template='={prompt} '", "environment.arguments={end: ' '}")}
    ways["chat"] = ("data.template=chat", "environment.role=user", "environment.arguments={end: ''}")
    plain, chat = (made(2, *common, f"data.train={tmp_path / name}.jsonl", *extra) for name, extra in ways.items())
    assert_same_run(plain, chat, files=["trace.jsonl"])
    assert [row["rollout/turns_mean"] > 1.1 for row in firsts_of(plain, "rollout/turns_mean")] == [True]


def test_evaluation_has_environments_too(made, arithmetic):
    evaluation = (f"eval.path={arithmetic / 'test.jsonl'}", "eval.temperature=0.7", "eval.samples_per_prompt=2")
    rows = rows_of(made(1, *TURNS, *evaluation))
    (first, last) = [row for row in rows if any(key.startswith("eval/") for key in row)]
    assert first["eval/test/environment"] > 0 and last["eval/test/environment"] > 0 and first["phase"] == "warmup"


@pytest.mark.parametrize(("on_error", "code"), [("fail", 1), ("drop", 0)])
def test_an_environment_that_fails_ends_the_run_or_costs_its_group(made, arithmetic, tmp_path, on_error, code):
    rows = [json.loads(line) for line in (arithmetic / "train.jsonl").read_text().splitlines()]
    broken = next(row for row in rows if row["prompt"] == "7+5=")
    others = [row for row in rows if row != broken][:7]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*others, broken]))
    breaking = ("environment.name=tests.runs.test_turn_runs:Breaking", f"environment.on_error={on_error}")
    data = (f"data.train={tmp_path / 'train.jsonl'}", "train.num_rollouts=1")
    said = made.into(tmp_path / "run", 2, *TURNS, *breaking, *data, code=code)
    if code:
        assert any("a riddle without an answer" in each and "environment.on_error=drop" in each for each in said), said
    else:
        (first, *_) = [row for row in rows_of(tmp_path / "run") if row["phase"] == "rl"]
        assert first["reward/excluded"] == 4.0


def test_an_environment_of_gymnasiums_kind_in_a_whole_run(made, tmp_path):
    """Prompts that ``rows`` wrote are trained on, with two turns and a quarter for each where none was cut off."""
    given = {"env": "tests.runs.test_turn_runs:Echo", "action": "tests.runs.test_turn_runs:as_it_is"}
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f"{json.dumps(row | {'answer': '0'})}\n" for row in rows(**given, seeds=range(16))))
    env = ("environment.name=gymnasium", f"environment.arguments={json.dumps(given)}", "rollout.max_response_tokens=40")
    logged = firsts_of(made(1, f"data.train={data}", *env, "reward.functions=[environment]"), "reward/environment")
    assert len(logged) == 2
    for row in logged:
        assert 1.0 < row["rollout/turns_mean"] <= 2.0 and 0.0 < row["reward/environment"] <= 0.5
        assert row["reward/environment"] >= 0.5 * (1.0 - row["rollout/truncated_share"])
