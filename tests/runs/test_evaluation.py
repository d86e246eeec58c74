"""Evaluation in whole runs.

Greedy values are Hugging Face's, samples repeat on any layout, and training does not see the evaluation.
"""

from __future__ import annotations

import json
import pathlib

import pytest
import torch

from tests.runs.command import arguments, command_line, rows_of, timeless, weights_of

ROLLOUTS = ("train.num_rollouts=3", "eval.every_rollouts=1")
SAMPLED = ("eval.samples_per_prompt=4", "eval.temperature=1.0", "eval.reward_threshold=0.5")


def graded(prompts, completions, completion_ids, **columns):
    """Return a multiple of 1/4 that depends on every token."""
    return [sum(ids) % 5 / 4 for ids in completion_ids]


GRADED = "reward.functions=[tests.runs.test_evaluation:graded]"


def run(pool, world: int, given: list[str]) -> None:
    results = pool.run(world, command_line, given, timeout_s=120)
    assert [code for code, _ in results] == [0] * world, results


def sets_of(folder: pathlib.Path) -> tuple[str, ...]:
    """Return the test set and, as another one, the first rows of the training data."""
    return (f"eval.path={folder / 'test.jsonl'}", f"eval.sets.seen={folder / 'train.jsonl'}", "eval.max_prompts=14")


def evaluated(run_dir: pathlib.Path) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if name.startswith("eval/")} for row in rows_of(run_dir)]


def greedy_mean(weights: dict[str, torch.Tensor] | None, folder: pathlib.Path, num_prompts: int) -> float:
    """Return the mean reward of Hugging Face's own greedy generation, a prompt at a time.

    weights: None for the model that the run began with.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    if weights is not None:
        assert set(model.load_state_dict(weights, strict=False).missing_keys) <= {"lm_head.weight"}  # tied
    totals = []
    for line in (folder / "test.jsonl").read_text().splitlines()[:num_prompts]:
        ids = torch.tensor([tokenizer(json.loads(line)["prompt"], add_special_tokens=False).input_ids])
        with torch.no_grad():
            found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)[
                0, ids.shape[1] :
            ]
        totals += graded([], [], [found.tolist()])
    return sum(totals) / len(totals)


def test_greedy_evaluation_equals_hugging_faces(pool, arithmetic, tmp_path):
    """Greedy evaluation equals Hugging Face's, before the first step and after the last one.

    Its settings are the short form alone, whose names are in the metrics.
    """
    run(pool, 1, arguments(arithmetic, tmp_path, f"eval.path={arithmetic / 'test.jsonl'}", GRADED, "optimizer.lr=1e-2"))
    first, *between, last = evaluated(tmp_path)
    names = {f"eval/test/{name}" for name in ("mean@1", "pass@1", "tests.runs.test_evaluation:graded")}
    names |= {f"eval/test/{name}" for name in ("mean@1_se", "response_tokens_mean", "truncated_share", "excluded")}
    assert set(first) == {f"{name}_before" for name in names} and set(last) == names and not any(between)
    values = (first["eval/test/mean@1_before"], last["eval/test/mean@1"])
    # 1e-12: the order of additions
    assert values == pytest.approx(
        (greedy_mean(None, arithmetic, 20), greedy_mean(weights_of(tmp_path), arithmetic, 20)), rel=1e-12
    )
    assert values[0] != values[1], "training must have moved something, or the second value shows nothing"


def test_data_parallel_evaluation_equals_one_process(pool, arithmetic, tmp_path):
    """Evaluation over two ranks equals that of one process.

    Two sets have fourteen prompts each, with four samples each; on two ranks a set's last prompt is rank 1's.
    """
    found = []
    for world in (1, 2):
        folder = tmp_path / str(world)
        run(pool, world, arguments(arithmetic, folder, *sets_of(arithmetic), *SAMPLED, *ROLLOUTS, GRADED))
        found.append(evaluated(folder))
    assert found[0] == found[1]
    kinds = (
        "mean@4",
        "mean@4_se",
        "pass@1",
        "pass@2",
        "pass@4",
        "response_tokens_mean",
        "truncated_share",
        "excluded",
        "tests.runs.test_evaluation:graded",
    )
    names = {f"eval/{name}/{kind}" for name in ("test", "seen") for kind in kinds}
    assert set(found[0][0]) == {f"{name}_before" for name in names} and set(found[0][-1]) == names
    assert found[0][-1]["eval/test/mean@4"] != found[0][-1]["eval/seen/mean@4"]
    for row in found[0][1::2]:  # the last step of each rollout
        assert row["eval/test/pass@1"] <= row["eval/test/pass@2"] <= row["eval/test/pass@4"]


PRODUCERS = {
    "sync": (),
    "prefetch": ("rollout.producer.mode=prefetch",),
    "streaming": (
        "rollout.producer.mode=streaming",
        "rollout.producer.min_groups=3",
        "rollout.producer.max_staleness_steps=2",
    ),
}


@pytest.mark.parametrize("producer", PRODUCERS)
def test_a_run_with_evaluation_equals_one_without(pool, arithmetic, tmp_path, producer):
    """A run with evaluation has the rows and weights of one without, to the bit, and repeats to the bit.

    The one without records no completions either: these change nothing too. Where rollouts are ahead, evaluation comes
    between them.
    """
    found = {}
    evaluation = (*sets_of(arithmetic), *SAMPLED, "eval.every_rollouts=1")
    for name, extra in (("none", ("metrics.log_completions=0",)), ("one", evaluation), ("two", evaluation)):
        run(
            pool,
            2,
            arguments(arithmetic, tmp_path / name, *PRODUCERS[producer], GRADED, "train.num_rollouts=4", *extra),
        )
        rows = [
            {key: value for key, value in timeless(row).items() if not key.startswith("eval/")}
            for row in rows_of(tmp_path / name)
        ]
        found[name] = (rows, (tmp_path / name / "trace.jsonl").read_text(), weights_of(tmp_path / name))
    assert evaluated(tmp_path / "one") == evaluated(tmp_path / "two") and any(evaluated(tmp_path / "one"))
    assert not (tmp_path / "none" / "completions.jsonl").exists()
    completions = [(tmp_path / name / "completions.jsonl").read_text() for name in ("one", "two")]
    assert completions[0] == completions[1]
    recorded = [(line["source"], line["rollout"]) for line in map(json.loads, completions[0].splitlines())]
    sets = [("eval/test", None), ("eval/seen", None)]
    wanted = [(f"{name}_before", None) for name, _ in sets] + [
        each for number in range(1, 5) for each in (("train", number), *sets)
    ]
    assert recorded == [each for each in wanted for _ in range(4)]  # four of each, where they belong
    rows, trace, weights = found["none"]
    for other in ("one", "two"):
        assert found[other][0] == rows and found[other][1] == trace
        assert all(torch.equal(weights[key], found[other][2][key]) for key in weights)
    if producer != "sync":
        assert max(row.get("async/staleness_max", 0.0) for row in rows) == 2.0, "no rollout was ahead"


def test_samples_without_reward_are_counted_and_not_averaged(pool, arithmetic, tmp_path):
    rows = [json.loads(line) for line in (arithmetic / "train.jsonl").read_text().splitlines()[:60]]
    failing = sum(row["prompt"].startswith("7") for row in rows)
    extra = (
        "reward.functions=[tests.reward_functions:explode_on_seven]",
        "reward.on_error=drop",
        "eval.max_prompts=60",
    )
    run(
        pool,
        2,
        arguments(
            arithmetic,
            tmp_path,
            f"eval.sets.seen={arithmetic / 'train.jsonl'}",
            *extra,
            "train.num_rollouts=1",
            *SAMPLED,
        ),
    )
    first = evaluated(tmp_path)[0]
    assert (
        failing
        and first["eval/seen/excluded_before"] == 4 * failing
        and first["eval/seen/pass@4_before"] <= 1 - failing / 60
    )


def test_evaluation_at_the_start_can_be_left_out(pool, arithmetic, tmp_path):
    """Evaluation at the start can be left out, without and with a warm-up, at whose end RL starts."""
    for name, extra in (("plain", ()), ("warm", ("sft.steps=2", "sft.samples_per_step=8"))):
        given = (*sets_of(arithmetic), "eval.at_start=false", "train.num_rollouts=1", *extra)
        run(pool, 1, arguments(arithmetic, tmp_path / name, *given))
        *others, last = evaluated(tmp_path / name)
        assert not any(others) and "eval/seen/mean@1" in last


def test_evaluation_of_nothing_is_refused(pool, arithmetic, tmp_path):
    ((code, said),) = pool.run(1, command_line, arguments(arithmetic, tmp_path, "eval.every_rollouts=2"), timeout_s=60)
    assert code == 2 and "eval.every_rollouts=2" in said and "eval.sets" in said, said


def test_evaluation_has_a_temperature_of_its_own(pool, arithmetic, tmp_path):
    """Evaluation has a temperature of its own.

    Before the first step it gives the values of a run at that temperature, and training stays at the rollouts'
    temperature.
    """
    cold = (*sets_of(arithmetic), *SAMPLED, "eval.temperature=0.4")
    runs = {
        "none": (),
        "own": cold,
        "both": (*cold, "rollout.temperature=0.4"),
        "warm": (*sets_of(arithmetic), *SAMPLED),
    }
    for name, extra in runs.items():
        run(pool, 1, arguments(arithmetic, tmp_path / name, GRADED, *extra))
    assert evaluated(tmp_path / "own")[0] == evaluated(tmp_path / "both")[0] != evaluated(tmp_path / "warm")[0]
    weights, others = weights_of(tmp_path / "none"), weights_of(tmp_path / "own")
    assert all(torch.equal(weights[key], others[key]) for key in weights)
