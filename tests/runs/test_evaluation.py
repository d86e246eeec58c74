"""Greedy values are Hugging Face's, samples repeat on any layout, and training does not see the evaluation."""

import json
import pathlib

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.pairwise import quick
from tests.runs.command import assert_same_run, firsts_of, rows_of, same_tensors, weights_of

ROLLOUTS, EVERY = "train.num_rollouts=2", "eval.every_rollouts=1"
SAMPLED = ("eval.samples_per_prompt=4", "eval.temperature=1.0", "eval.reward_threshold=0.5")
GRADED = "reward.functions=[tests.runs.test_evaluation:graded]"
ALWAYS = ("response_tokens_mean", "truncated_share", "excluded", "tests.runs.test_evaluation:graded")
PRODUCERS = {"sync": (), "prefetch": ("rollout.producer.mode=prefetch",),
             "streaming": ("rollout.producer.mode=streaming", "rollout.producer.min_groups=3",
                           "rollout.producer.max_staleness_steps=2")}


def graded(prompts, completions, completion_ids, **columns):
    """Return a multiple of 1/4 that depends on every token."""
    return [sum(ids) % 5 / 4 for ids in completion_ids]


@pytest.fixture
def sets(arithmetic: pathlib.Path) -> tuple[str, ...]:
    """Return the test set and, as another one, the first rows of the training data, both sampled."""
    seen = f"eval.sets.seen={arithmetic / 'train.jsonl'}"
    return (f"eval.path={arithmetic / 'test.jsonl'}", seen, "eval.max_prompts=8", *SAMPLED)


def evaluated(run_dir: pathlib.Path) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if name.startswith("eval/")} for row in rows_of(run_dir)]


def greedy_mean(weights: dict[str, torch.Tensor] | None, folder: pathlib.Path, num_prompts: int) -> float:
    """Return the mean reward of Hugging Face's own greedy generation. weights: None for those of the start."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    if weights is not None:
        assert set(model.load_state_dict(weights, strict=False).missing_keys) <= {"lm_head.weight"}  # tied
    totals = []
    for line in (folder / "test.jsonl").read_text().splitlines()[:num_prompts]:
        ids = torch.tensor([tokenizer(json.loads(line)["prompt"], add_special_tokens=False).input_ids])
        with torch.no_grad():
            found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)
        totals += graded([], [], [found[0, ids.shape[1] :].tolist()])
    return sum(totals) / len(totals)


def test_greedy_evaluation_equals_hugging_faces(made, arithmetic):
    """They are equal before the first step and after the last one, from settings of the short form alone."""
    run = made(1, f"eval.path={arithmetic / 'test.jsonl'}", GRADED, "optimizer.lr=1e-2")
    first, *between, last = evaluated(run)
    names = {f"eval/test/{name}" for name in ("mean@1", "pass@1", "mean@1_se", *ALWAYS)}
    assert set(first) == {f"{name}_before" for name in names} and set(last) == names and not any(between)
    values = (first["eval/test/mean@1_before"], last["eval/test/mean@1"])
    wanted = (greedy_mean(None, arithmetic, 20), greedy_mean(weights_of(run), arithmetic, 20))
    assert values == pytest.approx(wanted, rel=1e-12)  # the order of additions
    assert values[0] != values[1], "training must have moved something, or the second value shows nothing"


def test_data_parallel_evaluation_equals_one_process(made, sets):
    """Two sets have eight prompts with four samples each; on two ranks a set's last prompt is rank 1's."""
    found, other = (evaluated(made(world, GRADED, ROLLOUTS, *sets, EVERY)) for world in (1, 2))
    assert found == other
    kinds = ("mean@4", "mean@4_se", "pass@1", "pass@2", "pass@4", *ALWAYS)
    names = {f"eval/{name}/{kind}" for name in ("test", "seen") for kind in kinds}
    assert set(found[0]) == {f"{name}_before" for name in names} and set(found[-1]) == names
    assert found[-1]["eval/test/mean@4"] != found[-1]["eval/seen/mean@4"]
    for row in found[1::2]:  # the last step of each rollout
        assert row["eval/test/pass@1"] <= row["eval/test/pass@2"] <= row["eval/test/pass@4"]


@pytest.mark.parametrize("producer", quick(PRODUCERS, "sync"))
def test_a_run_with_evaluation_equals_one_without(made, sets, tmp_path, producer):
    """The one without records no completions either; where rollouts are ahead, evaluation comes between them."""
    given = (GRADED, ROLLOUTS, *PRODUCERS[producer])
    plain, with_it = made(2, *given, "metrics.log_completions=0"), made(2, *given, *sets, EVERY)
    assert not (plain / "completions.jsonl").exists()
    assert_same_run(plain, with_it, "eval/", files=["trace.jsonl"])
    recorded = map(json.loads, (with_it / "completions.jsonl").read_text().splitlines())
    wanted = [("eval/test_before", None), ("eval/seen_before", None)]
    for number in range(1, 3):
        wanted += [("train", number), ("eval/test", None), ("eval/seen", None)]
    # four of each, where they belong
    assert [(line["source"], line["rollout"]) for line in recorded] == [each for each in wanted for _ in range(4)]
    if producer != "sync":
        stale = [row["async/staleness_max"] for row in firsts_of(plain, "async/staleness_max")]
        assert max(stale) == 2.0, "no rollout was ahead"
    if producer == "prefetch":
        made.into(tmp_path, 2, *given, *sets, EVERY)
        assert_same_run(with_it, tmp_path)


def test_samples_without_reward_are_counted_and_not_averaged(made, arithmetic):
    rows = [json.loads(line) for line in (arithmetic / "train.jsonl").read_text().splitlines()[:60]]
    failing = sum(row["prompt"].startswith("7") for row in rows)
    raising = ("reward.functions=[tests.reward_functions:explode_on_seven]", "reward.on_error=drop")
    seen = (f"eval.sets.seen={arithmetic / 'train.jsonl'}", "eval.max_prompts=60", *SAMPLED)
    first = evaluated(made(2, *raising, *seen, "train.num_rollouts=1"))[0]
    assert failing and first["eval/seen/excluded_before"] == 4 * failing
    assert first["eval/seen/pass@4_before"] <= 1 - failing / 60


@pytest.mark.parametrize("extra", [(), ("sft.steps=2", "sft.samples_per_step=8")], ids=["plain", "warm"])
def test_evaluation_at_the_start_can_be_left_out(made, sets, extra):
    """Evaluation at the start can be left out, without and with a warm-up, at whose end RL starts."""
    *others, last = evaluated(made(1, *sets, "eval.at_start=false", "train.num_rollouts=1", *extra))
    assert not any(others) and "eval/seen/mean@4" in last


@pytest.mark.long
def test_evaluation_has_a_temperature_of_its_own(made, sets):
    """Its values are those of a run at that temperature, and training stays at the rollouts' temperature."""
    cold = (GRADED, ROLLOUTS, *sets, "eval.temperature=0.4")
    own, both = made(1, *cold), made(1, *cold, "rollout.temperature=0.4")
    warm = made(1, GRADED, ROLLOUTS, *sets, EVERY)
    assert evaluated(own)[0] == evaluated(both)[0] != evaluated(warm)[0]
    assert same_tensors(weights_of(warm), weights_of(own))
