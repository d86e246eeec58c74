"""Overlong punishment (DAPO, eq. 13) equals its three cases, and joins the right reward; cut samples are masked."""

import dataclasses
import functools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithm.advantage import reduction_weights
from megatron_rl.algorithm.signal import has_signal
from megatron_rl.config import Config, load_config
from megatron_rl.errors import ConfigError
from megatron_rl.rollout.groups.refill import kept_places
from megatron_rl.rollout.job import Group
from megatron_rl.rollout.reward_metrics import RewardErrors, reward_metrics
from megatron_rl.rollout.scored_batch import ScoredBatch, Scoring, overlong_shape, scored_batch
from megatron_rl.trainer.advantages.group import GroupAdvantages
from megatron_rl.trainer.passes.passes import Passes
from megatron_rl.types import BatchFacts, Prompt, Score
from megatron_rl.validate import objective, validate_config
from tests.runs.command import arguments, command_line, rows_of, weights_of
from tests.unit.algorithm.facts import make_facts
from tests.unit.reward.rig import rollout_of

SETTINGS = settings(max_examples=100, deadline=None, derandomize=True, database=None)


def naive_shape(length: int, limit: int, buffer: int) -> float:
    """Return the punishment of one length by the three cases of eq. 13."""
    if length <= limit - buffer:
        return 0.0
    return ((limit - buffer) - length) / buffer if length <= limit else -1.0


@SETTINGS
@given(limit=st.integers(1, 40), share=st.floats(0, 1), lengths=st.lists(st.integers(0, 50), max_size=12))
def test_the_shape_equals_equation_13(limit: int, share: float, lengths: list[int]) -> None:
    buffer = round(limit * share)
    found = overlong_shape(np.array(lengths, dtype=np.int64), max_response_tokens=limit, buffer_tokens=buffer)
    wanted = [naive_shape(length, limit, buffer) if buffer else 0.0 for length in lengths]
    assert found.dtype == np.float64 and np.array_equal(found, wanted)
    assert not np.signbit(found[found == 0.0]).any()  # no −0.0: a reward plus 0 prints as it did


def test_a_buffer_beyond_the_limit_is_refused() -> None:
    overrides = ["reward.overlong_buffer_tokens=11", "rollout.max_response_tokens=10", "model.hf_path=here"]
    given = load_config(None, overrides)
    with pytest.raises(ConfigError, match=r"reward\.overlong_buffer_tokens=11 .* rollout\.max_response_tokens=10"):
        validate_config(given, objective.overlong)
    for override in ("reward.overlong_buffer_tokens=-1", "reward.overlong_penalty=-0.5"):
        with pytest.raises(ConfigError, match=override.split("=")[0]):
            load_config(None, [override])


def facts_of(lengths: list[int], groups: list[int], loss_tokens: list[int] | None = None) -> BatchFacts:
    gathered = {"places": np.arange(len(lengths)), "weight_versions": np.zeros(len(lengths), dtype=np.int64)}
    facts = make_facts(groups, loss_tokens or lengths)
    return dataclasses.replace(facts, response_tokens=np.array(lengths), **gathered)


SHAPED = (
    *("reward.functions=[a:f,b:g]", "reward.overlong_buffer_tokens=4"),
    *("reward.overlong_penalty=0.5", "rollout.max_response_tokens=10"),
)


def scoring_of(config: Config) -> Scoring:
    return Scoring.of(config.reward, config.advantage, config.rollout, config.loss)


def scored_of(config: Config, facts: BatchFacts, totals: np.ndarray, columns: np.ndarray) -> ScoredBatch:
    return scored_batch(scoring_of(config), SimpleNamespace(facts=facts), totals, columns)


def metrics_of(config: Config, scored: ScoredBatch) -> dict[str, float]:
    return reward_metrics(scoring_of(config), scored, RewardErrors())


def kept(config: Config, scored: ScoredBatch) -> set[int]:
    return kept_places(config.rollout.dynamic_sampling.metric, config.reward, scored)


def advantages_of(config: Config, scored: ScoredBatch) -> np.ndarray:
    return GroupAdvantages(config.advantage)(scored, Passes()).advantages.of_sample


@pytest.mark.parametrize("estimator", ["dr_grpo", "gdpo"])
def test_the_punishment_is_part_of_the_total_and_a_function_of_its_own_for_gdpo(estimator: str) -> None:
    """Of two equal rewards the longer response has the lower advantage; a group of equal lengths has none."""
    facts = facts_of([3, 10, 3, 3], [0, 0, 1, 1])
    columns = np.ones((4, 2))
    shaped = load_config(None, [*SHAPED, f"advantage.estimator={estimator}"])
    scored = scored_of(shaped, facts, np.full(4, 2.0), columns)
    assert scored.rewards.totals.tolist() == [2.0, 2.0 - 0.5, 2.0, 2.0]
    found = advantages_of(shaped, scored)
    assert found[0] == -found[1] > 0 and (found[2:] == 0.0).all()
    if estimator == "dr_grpo":
        assert found[0] == 0.25
    without = load_config(None, ["reward.functions=[a:f,b:g]", f"advantage.estimator={estimator}"])
    assert (advantages_of(without, scored_of(without, facts, np.full(4, 2.0), columns)) == 0.0).all()


@functools.cache
def refilling(metric: str) -> Config:
    named = ("reward.functions=[arithmetic,b:g]", "reward.weights=[2,1]", f"rollout.dynamic_sampling.metric={metric}")
    return load_config(None, [*SHAPED, *named, "rollout.dynamic_sampling.max_rounds=1"])


@SETTINGS
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0.0, 1.0]), st.sampled_from([3, 8, 10])), min_size=1))
def test_dynamic_sampling_keeps_the_groups_of_unequal_answers(samples: list[tuple[int, float, int]]) -> None:
    """Eq. 11: some answers are correct and some are not; the penalty of eq. 13 alone keeps no group."""
    groups, correct, lengths = (list(column) for column in zip(*sorted(samples), strict=True))
    columns = np.column_stack([correct, np.arange(len(groups)) % 2])
    totals = columns @ (2.0, 1.0)
    scored = scored_of(refilling("null"), facts_of(lengths, groups), totals, columns)
    for metric, values in (("null", columns[:, 0]), ("b:g", columns[:, 1]), ("reward", totals)):
        mixed = {g for g in groups if len({v for v, own in zip(values, groups, strict=True) if own == g}) > 1}
        assert kept(refilling(metric), scored) == mixed & scored.live_places()
    assert kept(refilling("shaped"), scored) == scored.live_places()


def test_metrics_show_the_mean_punishment_and_what_is_masked() -> None:
    facts = facts_of([3, 8, 10, 10], [0, 0, 1, 1], [3, 8, 0, 0])
    totals = np.array([1.0, 0.75, np.nan, 0.5])  # the third was taken out of its group
    config = load_config(None, [*SHAPED, "loss.mask_truncated=true"])
    metrics = metrics_of(config, scored_of(config, facts, totals, np.ones((4, 2))))
    assert metrics["reward/overlong_penalty"] == pytest.approx((0.0 - 0.25 - 0.5) / 3, rel=1e-15)
    assert metrics["rollout/masked_truncated"] == 1.0
    without = load_config(None, ["reward.functions=[a:f,b:g]"])
    plain = metrics_of(without, scored_of(without, facts, totals, np.ones((4, 2))))
    assert not {"reward/overlong_penalty", "rollout/masked_truncated"} & set(plain)


def group() -> Group:
    prompt = Prompt(prompt_id="0@0", text="", token_ids=(5, 6), columns={})
    ends = [("stop", 1.0), ("length", 1.0), ("stop", None), ("length", None)]
    rollouts = tuple(rollout_of(prompt, k, (3, 7, 9), finish_reason=ends[k][0]) for k in range(4))
    return Group(rollouts=rollouts, scores=tuple(Score(total=total, by_function=(total,)) for _, total in ends))


def test_a_truncated_sample_carries_no_loss_token_where_that_is_asked_for() -> None:
    for mask_truncated, wanted in ((False, [3, 3, 0, 0]), (True, [3, 0, 0, 0])):
        samples = group().samples(mask_truncated=mask_truncated)
        assert [int(sample.loss_mask.sum()) for sample in samples] == wanted
        assert [sample.token_ids.tolist() for sample in samples] == [[5, 6, 3, 7, 9]] * 4


def test_a_masked_sample_has_no_signal_and_no_share_of_a_denominator() -> None:
    """Its reward stays in its group's mean."""
    facts = facts_of([4, 6, 6], [0, 0, 0], [4, 6, 0])
    config = load_config(None, ["reward.functions=[a:f]", "advantage.estimator=dr_grpo"])
    values = advantages_of(config, scored_of(config, facts, np.array([1.0, 1.0, 0.0]), np.zeros((3, 1))))
    np.testing.assert_allclose(values, [1 / 3, 1 / 3, -2 / 3], rtol=1e-15)  # one rounding
    assert has_signal(values, facts.loss_tokens).tolist() == [True, True, False]
    for reduction, wanted in (("token_mean", [0.1, 0.1, 0.0]), ("sequence_mean", [1 / 8, 1 / 12, 0.0])):
        assert reduction_weights(reduction, facts, np.arange(3), max_response_tokens=6).tolist() == wanted


def test_a_run_shapes_and_filters_and_its_skip_is_exact(pool, arithmetic, tmp_path):
    """Its rewards are 0 or 1 plus 0.5 times eq. 13 of their lengths; its final weights equal the dense run's."""
    extra = ["reward.overlong_buffer_tokens=3", "reward.overlong_penalty=0.5", "loss.mask_truncated=true"]
    for mode in ("exact", "off"):
        plan = [f"skip.mode={mode}", "plan.samples_per_microbatch=2", "plan.repack=false", "train.num_rollouts=1"]
        results = pool.run(2, command_line, arguments(arithmetic, tmp_path / mode, *plan, *extra), timeout_s=120)
        assert [code for code, _ in results] == [0, 0], results
    exact, dense = weights_of(tmp_path / "exact"), weights_of(tmp_path / "off")
    assert all(torch.equal(exact[name], dense[name]) for name in dense)
    firsts = [row for row in rows_of(tmp_path / "exact") if "reward/mean" in row]
    traced = [json.loads(line) for line in (tmp_path / "exact" / "trace.jsonl").read_text().splitlines()]
    assert len(firsts) == len(traced) == 1
    for row, line in zip(firsts, traced, strict=True):
        lengths, rewards = np.array(line["response_tokens"]), np.array(line["reward"])
        shape = np.array([naive_shape(int(length), 6, 3) for length in lengths])
        np.testing.assert_allclose(rewards, lengths % 2 + 0.5 * shape, rtol=1e-15)
        assert row["reward/overlong_penalty"] == pytest.approx(0.5 * shape.mean(), rel=1e-12)
        assert row["reward/overlong_penalty"] < 0
        assert row["rollout/masked_truncated"] == (np.array(line["loss_tokens"]) == 0).sum() > 0
        assert (lengths[np.array(line["loss_tokens"]) == 0] == 6).all()
