"""Checks rollout/groups/replay_buffer.py: every invariant under Hypothesis, and draws against their odds."""

import json
import math
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import replace as changed
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config import ReplayConfig
from megatron_rl.rollout.groups import replay_buffer
from megatron_rl.rollout.groups.replay_buffer import Entry, ReplayBuffer, group_scores
from tests.patience import patient
from tests.runs.command import ROOT, said_by

# Derandomized: the same cases on every machine, so that a failure is never a matter of luck.
SETTINGS = settings(max_examples=150, deadline=None, derandomize=True, database=None)

# Few scores, so that ties are common; some that vanish beside the others, and some whose sum overflows.
scores = st.sampled_from([0.0, 0.5, 0.5, 1.0, 2.0, 0.1 + 0.2, 5e-324, 1e-300, 1.7e308])
keys = st.sampled_from(["17@0", "17@0.1", "2@0", "10@0", "3@1", "é@0"])
entries = st.builds(Entry, key=keys, score=scores, version=st.integers(0, 6), uses=st.integers(0, 1))
operations = st.one_of(
    st.tuples(st.just("add"), st.lists(entries, max_size=4)),
    st.tuples(st.just("draw"), st.tuples(st.integers(0, 4), st.integers(0, 99), st.lists(keys, max_size=2))),
    st.tuples(st.just("expire"), st.integers(0, 9)),
    st.tuples(st.just("retire"), st.none()),
    st.tuples(st.just("reload"), st.none()),
)
configs = st.builds(
    ReplayConfig,
    capacity_groups=st.integers(0, 5),
    max_age_versions=st.one_of(st.none(), st.integers(1, 4)),
    max_uses=st.integers(1, 3),
)


def better(left: Entry, right: Entry) -> bool:
    ranks = [(entry.score, entry.version) for entry in (left, right)]
    return ranks[0] > ranks[1] or (ranks[0] == ranks[1] and left.key < right.key)


@dataclass(kw_only=True)
class Model:
    """A replay buffer as a plain list; every decision looks at all of it, one entry at a time."""

    config: ReplayConfig
    seed: int
    held: list[Entry]

    def add(self, given: list[Entry]) -> set[str]:
        for entry in given:
            self.held = [x for x in self.held if x.key != entry.key] + [entry]
        held = self.held
        return self.drop(lambda x: x.score == 0 or sum(better(y, x) for y in held) >= self.config.capacity_groups)

    def draw(self, count: int, rollout: int, exclude: list[str]) -> list[str]:
        """Draw by exact fractions along the line of scores, the best first."""
        left = [x for x in self.held if x.key not in exclude and x.uses < self.config.max_uses]
        key, drawn = np.array([self.seed, rollout], dtype=np.uint64), []
        raw = np.random.Philox(key=key, counter=[0, 0, 0, 1]).random_raw(max(count, 1))
        for number in raw.tolist()[:count]:
            if not left:
                break
            left = sorted(left, key=lambda x: sum(better(y, x) for y in self.held))
            at, end = Fraction(number >> 11, 2**53) * sum(Fraction(x.score) for x in left), Fraction(0)
            for entry in left:
                end += Fraction(entry.score)
                if end > at:
                    break
            left.remove(entry)
            drawn.append(entry.key)
        self.held = [changed(x, uses=x.uses + drawn.count(x.key)) for x in self.held]
        return drawn

    def drop(self, goes) -> set[str]:
        gone = {x.key for x in self.held if goes(x)}
        self.held = [x for x in self.held if not goes(x)]
        return gone

    def expire(self, version: int) -> set[str]:
        most = self.config.max_age_versions
        return self.drop(lambda x: most is not None and x.version + most < version)

    def retire(self) -> set[str]:
        return self.drop(lambda x: not x.uses < self.config.max_uses)


def buffer_of(scores: Mapping[str, float], config: ReplayConfig, seed: int = 0) -> ReplayBuffer:
    """Make a buffer that has these scores of version 0, by key."""
    buffer = ReplayBuffer(config, seed)
    buffer.add([Entry(key=key, score=score, version=0) for key, score in scores.items()])
    return buffer


def through_json(buffer: ReplayBuffer, config: ReplayConfig, seed: int) -> ReplayBuffer:
    other = ReplayBuffer(config, seed)
    assert other.load_state(json.loads(json.dumps(buffer.state()))) == []
    assert other.entries == buffer.entries
    return other


def assert_invariants(config: ReplayConfig, seed: int, steps: list[tuple[str, object]]) -> None:
    """Assert every numbered invariant of replay_buffer.py after each operation of a history."""
    buffer, model = ReplayBuffer(config, seed), Model(config=config, seed=seed, held=[])
    for name, value in steps:
        before, twin = buffer.entries, through_json(buffer, config, seed)  # 6
        held = {x.key for x in before}
        match name:
            case "add":
                gone, wanted, told = buffer.add(value), model.add(value), twin.add(value)
                assert_none_lost(held | {x.key for x in value}, buffer, gone)
            case "expire" | "retire":
                at = () if name == "retire" else (value,)
                gone, wanted, told = (getattr(x, name)(*at) for x in (buffer, model, twin))
                assert_none_lost(held, buffer, gone)
                most = math.inf if config.max_age_versions is None else config.max_age_versions
                assert all(value - x.version <= most if at else x.uses < config.max_uses for x in buffer.entries)  # 5
            case "draw":
                count, rollout, exclude = value
                gone = buffer.draw(count, rollout=rollout, exclude=exclude)
                wanted, told = model.draw(count, rollout, exclude), twin.draw(count, rollout=rollout, exclude=exclude)
                assert gone == wanted  # 4: the order too
                able = {x.key for x in before if x.uses < config.max_uses} - set(exclude)  # 3
                assert len(set(gone)) == len(gone) == min(count, len(able)) and set(gone) <= able
                assert buffer.entries == tuple(changed(x, uses=x.uses + (x.key in gone)) for x in before)
            case "reload":
                gone = wanted = told = []
                buffer = through_json(buffer, config, seed)
        assert gone == told and twin.entries == buffer.entries  # 6
        assert set(gone) == set(wanted)
        held = buffer.entries  # 1
        assert len(buffer) == len(held) == len({x.key for x in held}) <= config.capacity_groups
        assert all(math.isfinite(x.score) and x.score > 0 for x in held)
        assert all(better(left, right) for left, right in zip(held, held[1:], strict=False))
        assert set(held) == set(model.held)


def assert_none_lost(were: set[str], buffer: ReplayBuffer, gone: list[str]) -> None:
    assert sorted([*gone, *(x.key for x in buffer.entries)]) == sorted(were)  # 2


@SETTINGS
@given(config=configs, seed=st.integers(0, 2**64 - 1), steps=st.lists(operations, min_size=4, max_size=14))
def test_invariants(config: ReplayConfig, seed: int, steps: list) -> None:
    assert_invariants(config, seed, steps)


# ---- draws ----------------------------------------------------------------------------------------------------------


def test_draws_are_in_proportion_to_the_scores_left_and_another_rollout_or_seed_draws_anew() -> None:
    scores, rounds = {"a": 5.0, "b": 3.0, "c": 1.0, "d": 1.0}, 4000
    chances = {(x, y): scores[x] / 10 * scores[y] / (10 - scores[x]) for x in scores for y in scores if x != y}
    buffer = buffer_of(scores, ReplayConfig(capacity_groups=4, max_uses=10**9), seed=7)
    found = Counter(tuple(buffer.draw(2, rollout=rollout)) for rollout in range(rounds))
    assert set(found) <= set(chances) and math.isclose(sum(chances.values()), 1.0)
    chi_square = sum((found[cell] - rounds * chance) ** 2 / (rounds * chance) for cell, chance in chances.items())
    # 11 degrees of freedom: one seed in a million is above 48.9. The seed is fixed, so it is not a matter of luck.
    assert chi_square < 48.9

    def drawn(seed: int, rollout: int) -> list[str]:
        buffer = buffer_of({f"{i}@0": 1.0 for i in range(100)}, ReplayConfig(capacity_groups=100), seed)
        return buffer.draw(10, rollout=rollout)

    assert drawn(1, 2) == drawn(1, 2)
    assert len({tuple(drawn(seed, rollout)) for seed in (0, 1, 2, -1) for rollout in (0, 1, 2)}) == 12


@pytest.mark.parametrize(("uniform", "key"), [(0.0, "a"), (0.5 - 2**-53, "a"), (0.5, "b"), (1 - 2**-53, "b")])
def test_ends_of_the_line_of_scores(uniform: float, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key has its own end of the line and not the next one's; one that vanishes beside the others comes last."""
    monkeypatch.setattr(replay_buffer, "_uniforms", lambda seed, rollout, count: [uniform] * count)
    buffer = buffer_of({"a": 1e300, "b": 1e300, "c": 5e-324}, ReplayConfig(capacity_groups=4))
    drawn = buffer.draw(3, rollout=0)
    assert drawn[0] == key and drawn[2] == "c"


# ---- the faults that such buffers are known for ---------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0])
def test_a_score_that_is_no_amount_names_its_key(bad: float) -> None:
    with pytest.raises(ValueError, match=rf"group 17@0\.1 is {bad}"):
        Entry(key="17@0.1", score=bad, version=0)
    buffer = ReplayBuffer(ReplayConfig(capacity_groups=2), 0)
    state = json.loads(json.dumps({"entries": [{"key": "17@0.1", "score": bad, "version": 0, "uses": 0}]}))
    with pytest.raises(ValueError, match=r"group 17@0\.1"):
        buffer.load_state(state)


def test_age_is_in_weight_versions_and_null_never_expires() -> None:
    for most, at_once, late in ((2, [], ["4", "3"]), (None, [], [])):
        buffer = ReplayBuffer(ReplayConfig(capacity_groups=3, max_age_versions=most), 0)
        buffer.add([Entry(key=str(version), score=1.0, version=version) for version in (3, 4, 5)])
        assert [buffer.expire(5) for _ in range(3)] == [at_once] * 3  # ghost steps: the weights stayed the same
        assert buffer.expire(7) == late


def test_a_smaller_size_tells_what_left_and_numbers_of_numpy_are_json() -> None:
    large = buffer_of({str(score): score for score in (1, 2, 3, 4)}, ReplayConfig(capacity_groups=5))
    small = ReplayBuffer(ReplayConfig(capacity_groups=2), 0)
    assert small.load_state(json.loads(json.dumps(large.state()))) == ["2", "1"]
    assert [x.key for x in small.entries] == ["4", "3"]
    assert small.load_state({"entries": []}) == [] and len(small) == 0  # the state replaces the entries that it had
    buffer = ReplayBuffer(ReplayConfig(capacity_groups=5), 0)
    buffer.add([Entry(key="a", score=np.float32(0.1), version=np.int64(3))])
    assert through_json(buffer, ReplayConfig(capacity_groups=5), 0).entries[0].version == 3


# ---- scores ---------------------------------------------------------------------------------------------------------


def score_naive(advantages: list, groups: list, included: list, rewards: list, group: int) -> float:
    member = [i for i in range(len(groups)) if included[i] and groups[i] == group]
    total = 0.0
    for function in range(len(rewards[0])):
        values = [rewards[i][function] for i in member if not math.isnan(rewards[i][function])]
        if len(values) > 1 and len(set(values)) > 1:
            mean = math.fsum(values) / len(values)
            total += math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1))
    return math.fsum(abs(advantages[i]) for i in member) * total


@SETTINGS
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(0, 14), functions=st.integers(1, 3))
def test_scores_equal_the_formula(seed: int, count: int, functions: int) -> None:
    random = np.random.default_rng(seed)
    groups, included = random.choice([7, 0, 3, 40], count), random.random(count) < 0.8
    rewards = random.choice([0.0, 1.0, 0.1 + 0.2, 0.3, math.nan], (count, functions))
    advantages = np.where(included, random.choice([0.0, -1.5, 0.25], count), random.choice([0.0, math.nan], count))
    numbers, found = group_scores(advantages, groups, included, rewards)
    assert numbers.dtype == np.int64 and numbers.tolist() == sorted(set(groups.tolist())) and found.dtype == np.float64
    lists = advantages.tolist(), groups.tolist(), included.tolist(), rewards.tolist()
    # Rounding of a few sums; 0.1 + 0.2 and 0.3 differ by 6e-17, whose square root of squares keeps few of its digits.
    np.testing.assert_allclose(found, [score_naive(*lists, group) for group in numbers], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("value", [0.0, 0.3, 0.1 + 0.2, 1 / 3, 1e-30, -7e11])
def test_equal_rewards_score_exactly_zero(value: float) -> None:
    """Though the mean of 7 times 0.1 + 0.2 is not that number; whitened advantages of such a group need not be 0."""
    rewards = np.array([[value, math.nan]] * 7 + [[2.0, 1.0]])
    _, found = group_scores(np.ones(8), np.array([5] * 7 + [6]), np.ones(8, dtype=bool), rewards)
    assert found.tolist() == [0.0, 0.0]  # and one sample has no spread


@pytest.mark.parametrize("bad", [math.inf, -math.inf])
def test_an_infinite_reward_reaches_the_error_that_names_its_group(bad: float) -> None:
    for rewards in ([bad, 1.0], [bad, bad]):
        advantages, groups = np.array([1.0, -1.0]), np.zeros(2, dtype=int)
        _, found = group_scores(advantages, groups, np.ones(2, dtype=bool), np.array(rewards)[:, None])
        with pytest.raises(ValueError, match="group 4@0"):
            Entry(key="4@0", score=float(found[0]), version=0)


def test_neither_file_needs_torch() -> None:
    modules = "megatron_rl.rollout.groups.replay_buffer, megatron_rl.rollout.groups.reroll_buffer"
    code = f"import sys, {modules}; print({{'torch', 'megatron'}} & set(sys.modules))"
    assert said_by([sys.executable, "-c", code], ROOT, patient(600)) == "set()\n"
