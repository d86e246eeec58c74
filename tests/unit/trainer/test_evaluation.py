"""Evaluation without engines: pass@k equals enumeration, a set's metrics equal the naive loop; names of prompts."""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config import DataConfig, load_config
from megatron_rl.data.prompt_dataset import PromptDataset
from megatron_rl.data.solution import Solution
from megatron_rl.errors import ConfigError
from megatron_rl.rollout.job import RolloutJob
from megatron_rl.trainer.evaluation import Evaluation, Outcomes, pass_at_k, powers_of_two, set_metrics
from megatron_rl.trainer.supervised import response_batches
from megatron_rl.types import Prompt, Rollout, Score
from tests.unit.reward.rig import rollout_of
from tests.unit.rollout.fake_engine import WillingEngine, manager_of
from tests.unit.rollout.tiny_model import _tokenizer


@st.composite
def counts(draw, most: int = 9) -> tuple[int, int, int]:
    num_samples = draw(st.integers(1, most))
    return num_samples, draw(st.integers(0, num_samples)), draw(st.integers(1, num_samples))


@given(counts())
def test_pass_at_k_equals_enumeration(drawn):
    """Where every choice of k samples is as likely as any other, pass@k is the share of those with one that passed."""
    num_samples, num_passed, k = drawn
    choices = list(itertools.combinations([True] * num_passed + [False] * (num_samples - num_passed), k))
    share = Fraction(sum(any(choice) for choice in choices), len(choices))
    assert pass_at_k(num_samples, num_passed, k) == float(share)


@given(counts(most=500))
def test_pass_at_k_is_bounded_and_rises(drawn):
    """Even of numbers whose binomials no float holds, pass@k is bounded by 0 and 1 and rises with k."""
    num_samples, num_passed, k = drawn
    found = pass_at_k(num_samples, num_passed, k)
    assert 0.0 <= found <= 1.0 and (found == 0.0) == (num_passed == 0)
    assert pass_at_k(num_samples, num_passed, num_samples) == (num_passed > 0)
    assert pass_at_k(num_samples, num_passed, 1) == num_passed / num_samples <= found


@pytest.mark.parametrize("num_samples,num_passed,k", [(4, 1, 0), (4, 1, 5), (4, 5, 2), (4, -1, 2)])
def test_pass_at_k_refuses_what_is_no_draw(num_samples, num_passed, k):
    with pytest.raises(ValueError, match=f"pass@{k} of {num_samples} samples of which {num_passed} passed"):
        pass_at_k(num_samples, num_passed, k)


def test_powers_of_two_and_when_it_is_due():
    found = [powers_of_two(limit) for limit in (1, 2, 3, 4, 6, 8)]
    assert found == [[1], [1, 2], [1, 2], [1, 2, 4], [1, 2, 4], [1, 2, 4, 8]]

    def due(*overrides: str) -> tuple[bool, list[int]]:
        evaluation = evaluation_of("train.num_rollouts=5", *overrides)
        return evaluation.due_at_start(), [n for n in range(1, 6) if evaluation.due(n, last=n == 5)]

    assert due() == (True, [5]) and due("eval.every_rollouts=2") == (True, [2, 4, 5])
    assert due("eval.at_start=false", "eval.every_rollouts=1") == (False, [1, 2, 3, 4, 5])
    assert due("eval.at_start=false", "train.num_rollouts=0")[0]  # after its warm-up such a run is at its end


@st.composite
def outcomes(draw) -> Outcomes:
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 5)))
    value = st.one_of(st.none(), st.sampled_from([-1.0, 0.0, 0.5, 1.0, 1.5]))
    cells = math.prod(shape)
    totals = draw(st.lists(value, min_size=cells, max_size=cells))
    by_function = draw(st.lists(value, min_size=2 * cells, max_size=2 * cells))
    return Outcomes(totals=np.array(totals, dtype=np.float64).reshape(shape),
                    by_function=np.array(by_function, dtype=np.float64).reshape(*shape, 2),
                    response_tokens=draw(st.integers(cells, 10 * cells)), truncated=draw(st.integers(0, cells)))


@given(outcomes(), st.sampled_from([0.0, 0.5, 1.0]))
def test_set_metrics_equal_the_naive_loop(drawn, threshold):
    names = ("m:one", "m:two")
    num_prompts, size = drawn.totals.shape
    wanted = {"eval/x/response_tokens_mean": drawn.response_tokens / (num_prompts * size)}
    wanted["eval/x/truncated_share"] = drawn.truncated / (num_prompts * size)
    scored = [value for value in drawn.totals.ravel().tolist() if not math.isnan(value)]
    wanted["eval/x/excluded"] = num_prompts * size - len(scored)
    if scored:
        wanted[f"eval/x/mean@{size}"] = sum(scored) / len(scored)
    for k in (k for k in (1, 2, 4) if k <= size):
        passes = [[value >= threshold for value in row] for row in drawn.totals.tolist()]
        choices = [[any(choice) for choice in itertools.combinations(row, k)] for row in passes]
        wanted[f"eval/x/pass@{k}"] = sum(sum(each) / len(each) for each in choices) / num_prompts
    for index, name in enumerate(names):
        values = [value for value in drawn.by_function[..., index].ravel().tolist() if not math.isnan(value)]
        if values:
            wanted[f"eval/x/{name}"] = sum(values) / len(values)
    found = set_metrics("x", drawn, names, threshold=threshold)
    error = found.pop(f"eval/x/mean@{size}_se", None)
    # 1e-12: the order of additions
    assert found == pytest.approx(wanted, rel=1e-12, abs=1e-15)
    clusters = [[value for value in row if not math.isnan(value)] for row in drawn.totals.tolist()]
    clusters = [row for row in clusters if row]
    if len(clusters) < 2:
        assert error is None
        return
    mean = sum(scored) / len(scored)
    spread = sum((value - mean) * (other - mean) for row in clusters for value in row for other in row)
    scale = len(clusters) / (len(clusters) - 1)
    assert error == pytest.approx(math.sqrt(max(0.0, scale * spread)) / len(scored), rel=1e-9, abs=1e-8)


def evaluation_of(*overrides: str) -> Evaluation:
    return Evaluation(load_config(None, ["data.max_prompt_tokens=8", *overrides]), _tokenizer(), 64)


def write_rows(path, texts) -> str:
    path.write_text("".join(json.dumps({"prompt": text, "answer": "2"}) + "\n" for text in texts))
    return str(path)


def test_sets_share_rows_and_no_names(tmp_path):
    """The same row in two sets and in the training data is three prompts; no set's has a place in the data."""
    rows = write_rows(tmp_path / "rows.jsonl", ["1+1=", "2+3=", "4-2="])
    found = evaluation_of(f"eval.path={rows}", f"eval.sets.hard={rows}", "eval.max_prompts=2").sets
    assert {name: [(p.prompt_id, p.text) for p in prompts] for name, prompts in found.items()} == {
        "test": [("eval/test/0@0", "1+1="), ("eval/test/1@0", "2+3=")],
        "hard": [("eval/hard/0@0", "1+1="), ("eval/hard/1@0", "2+3=")],
    }
    source = PromptDataset([{"prompt": "1+1=", "answer": "2"}], _tokenizer(), DataConfig(), seed=0)
    with pytest.raises(ValueError):
        source.put_back(found["test"][:1])


def test_a_bad_row_names_its_set(tmp_path):
    good, long = write_rows(tmp_path / "good.jsonl", ["1+1="]), write_rows(tmp_path / "long.jsonl", ["1+1=", "1" * 9])
    for overrides, message in (
        ([f"eval.sets={{a: {good}, b: {long}}}"], r"^eval.sets.b='.*': row 1 .*long.jsonl:2.: the prompt has 9 tokens"),
        ([f"eval.path={long}", f"eval.sets.b={good}"], "^eval.path='.*long.jsonl': row 1"),
        (["eval.sets.c=nowhere.jsonl"], "eval.sets.c='nowhere.jsonl' does not exist"),
    ):
        with pytest.raises(ConfigError, match=message):
            evaluation_of(*overrides)


@pytest.fixture
def alone() -> Iterator[None]:
    """Make a world of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class FakeGeneration:
    """Gives prompt p's sample s its p + s + 1 tokens, the total p + s / 4, and no end to sample 1 of prompt 1."""

    def produce(self, prompts: Mapping[int, Prompt], samples_per_prompt: int, *, temperature: float) -> RolloutJob:
        self.asked = ([prompt.prompt_id for prompt in prompts.values()], samples_per_prompt, temperature)
        job = RolloutJob(prompts, list(prompts), dict.fromkeys(prompts, samples_per_prompt))
        for place, prompt in prompts.items():
            rollouts = []
            for index in range(samples_per_prompt):
                reason = "length" if (place, index) == (1, 1) else "stop"
                rollouts.append(rollout_of(prompt, index, (5,) * (place + index + 1), f"answer {index}", reason))
            totals = [place + index / 4 for index in range(samples_per_prompt)]
            job.put(place, rollouts, [Score(total=total, by_function=(total,)) for total in totals])
        return job


@pytest.mark.parametrize("suffix", ["", "_before"])
def test_each_sets_numbers_are_its_own(alone, tmp_path, suffix):
    """Two prompts in one set and one in the other, in one call, give each set its own numbers."""
    rows = write_rows(tmp_path / "rows.jsonl", ["1+1=", "2+3="]), write_rows(tmp_path / "row.jsonl", ["1+1="])
    overrides = ("eval.samples_per_prompt=2", "eval.temperature=0.5", "reward.functions=[m:f]")
    generation = FakeGeneration()
    evaluation = evaluation_of(f"eval.sets={{a: {rows[0]}, b: {rows[1]}}}", *overrides)
    found = evaluation.run(generation, step=3, suffix=suffix)
    assert generation.asked == (["eval/a/0@0", "eval/a/1@0", "eval/b/0@0"], 2, 0.5)
    metrics = dict(found.metrics)
    assert metrics.pop("time/eval_s") >= 0
    # totals: 0, 1/4 and 1, 5/4 in a; 2, 9/4 in b
    values = {**{"a/mean@2": 0.625, "a/pass@1": 0.5, "a/pass@2": 0.5, "a/m:f": 0.625},
              "a/mean@2_se": 0.5,  # the prompts' means are 1/8 and 9/8
              **{"a/response_tokens_mean": 2.0, "a/truncated_share": 0.25, "a/excluded": 0.0},
              **{"b/mean@2": 2.125, "b/pass@1": 1.0, "b/pass@2": 1.0, "b/m:f": 2.125},
              **{"b/response_tokens_mean": 3.5, "b/truncated_share": 0.0, "b/excluded": 0.0}}
    assert metrics == {f"eval/{name}{suffix}": value for name, value in values.items()}
    # of each set the best and the worst of each prompt
    assert [(each.source, each.sample, each.response, each.reward) for each in found.completions] == [
        (f"eval/{name}{suffix}", f"eval/{name}/{row}@0#{index}", f"answer {index}", total + index / 4)
        for name, row, total in (("a", 0, 0.0), ("a", 1, 1.0), ("b", 0, 2.0))
        for index in (1, 0)
    ]
    assert {each.rewards["m:f"] for each in found.completions} == {each.reward for each in found.completions}


def row_of(prompt: Prompt) -> int:
    return int(prompt.prompt_id.rpartition("/")[2].split("@")[0])


class RowEngine(WillingEngine):
    """Answers row r's sample k with r + k + 1 tokens."""

    def group(self, prompt: Prompt, samples: int) -> list[Rollout]:
        return [rollout_of(prompt, index, (5,) * (row_of(prompt) + index + 1)) for index in range(samples)]


def evaluate_on_rank(rank: int, world: int, sets: str) -> dict[str, float]:
    """Evaluate the sets with a reward of the row's number for sample 0 and half a point more for sample 1."""

    def score(rollouts: Sequence[Rollout]) -> list[Score]:
        totals = [row_of(rollout.prompt) + rollout.sample_index / 2 for rollout in rollouts]
        return [Score(total=total, by_function=(total,)) for total in totals]

    manager = manager_of(RowEngine(), score=score, share=(rank, world))
    manager.sync_weights()
    evaluation = evaluation_of(sets, "eval.samples_per_prompt=2", "eval.temperature=1", "reward.functions=[m:f]")
    metrics = dict(evaluation.run(manager, step=0).metrics)
    manager.close()
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


@pytest.mark.parametrize("world", [1, 2])
def test_no_prompt_of_an_uneven_evaluation_is_left_out_or_counted_twice(pool, tmp_path, world: int) -> None:
    """Sets of 3 and 4 prompts are 7 together; on two ranks one has 4 of them and the other 3."""
    sizes = {"a": 3, "b": 4}
    paths = {name: write_rows(tmp_path / f"{name}.jsonl", [f"{k}+1=" for k in range(n)]) for name, n in sizes.items()}
    wanted = {}
    for name, size in sizes.items():
        samples = [(row, index) for row in range(size) for index in (0, 1)]
        wanted[f"eval/{name}/mean@2"] = sum(row + index / 2 for row, index in samples) / len(samples)
        wanted[f"eval/{name}/response_tokens_mean"] = sum(row + index + 1 for row, index in samples) / len(samples)
        wanted[f"eval/{name}/pass@2"] = (size - 1) / size  # of row 0 neither sample has 1
    sets = f"eval.sets={{a: {paths['a']}, b: {paths['b']}}}"
    for found in pool.run(world, evaluate_on_rank, sets):
        assert {name: found[name] for name in wanted} == wanted


@pytest.mark.parametrize("of_row", [1, 2])
def test_batches_of_held_out_responses_have_each_response_once(of_row: int) -> None:
    """Of 7 rows in batches of 3, the last has one row, and on two ranks one rank has none of it."""
    prompts = [Prompt(prompt_id=f"{row}@0", text="", token_ids=(2,), columns={}) for row in range(7)]
    responses = [Solution(prompt=prompt, response_ids=(3, 0)) for prompt in prompts for _ in range(of_row)]
    batches: list[list[list[str]]] = []
    for rank in (0, 1):
        backend = SimpleNamespace(
            topology=SimpleNamespace(rank=rank, world_size=2), weight_version=0,
            gather=lambda samples, groups, places: [sample.sample_id for sample in samples],
        )
        batches.append(list(response_batches(backend, responses, 3, of_row=of_row)))
    found = [sorted(name for part in parts for name in part) for parts in zip(*batches, strict=True)]
    assert found == [[f"{row}@0#{k}" for row in rows for k in range(of_row)] for rows in ((0, 1, 2), (3, 4, 5), (6,))]
