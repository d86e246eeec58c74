"""groups/reroll_buffer.py: every invariant under Hypothesis against a plain list, and failed groups against a loop."""

import json
import math
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config import RerollConfig
from megatron_rl.rollout.groups.reroll_buffer import RerollBuffer, failed_groups

# Derandomized: the same cases on every machine, so that a failure is never a matter of luck.
SETTINGS = settings(max_examples=150, deadline=None, derandomize=True, database=None)
IDS = [f"{row}@0" for row in range(8)]

asked = st.tuples(st.sampled_from(IDS), st.integers(0, 3))
operations = st.one_of(
    st.tuples(st.just("note"), st.lists(asked, min_size=1, max_size=6)),
    st.tuples(st.just("take"), st.tuples(st.sampled_from([0.0, 0.49, 0.5, 0.75, 1.0]), st.integers(-1, 5))),
    st.tuples(st.just("reload"), st.none()),
)
configs = st.builds(
    RerollConfig, max_groups=st.integers(0, 4), capacity_prompts=st.integers(1, 5), max_attempts=st.integers(1, 4),
    start_fraction=st.sampled_from([0.0, 0.5, 1.0]),
)


@dataclass(kw_only=True)
class Model:
    """A re-roll buffer as a plain list, the longest-waiting first, searched from its start each time."""

    config: RerollConfig
    waiting: list[tuple[str, int]] = field(default_factory=list)

    def note(self, given_: list[tuple[str, int]]) -> int:
        """Note failed groups; return how many of them began to wait."""
        began = 0
        for prompt_id, attempt in given_:
            places = [place for place, (other, _) in enumerate(self.waiting) if other == prompt_id]
            if places:
                self.waiting[places[0]] = (prompt_id, max(attempt, self.waiting[places[0]][1]))
            elif attempt < self.config.max_attempts:
                self.waiting.append((prompt_id, attempt))
                began += 1
            self.waiting = [x for x in self.waiting if x[1] < self.config.max_attempts]
            while len(self.waiting) > self.config.capacity_prompts:
                self.waiting.pop(0)
        return began

    def take(self, fraction: float, room: int) -> list[tuple[str, int]]:
        most, given_ = min(room, self.config.max_groups) if fraction >= self.config.start_fraction else 0, []
        while self.waiting and len(given_) < most:
            prompt_id, attempt = self.waiting.pop(0)
            given_.append((prompt_id, attempt + 1))
        return given_


def through_json(buffer: RerollBuffer, config: RerollConfig) -> RerollBuffer:
    other = RerollBuffer(config)
    other.load_state(json.loads(json.dumps(buffer.state())))
    return other


def assert_invariants(config: RerollConfig, steps: list[tuple[str, object]]) -> None:
    """Assert every numbered invariant of reroll_buffer.py after each operation of a history."""
    buffer, model = RerollBuffer(config), Model(config=config)
    buffered = issued = 0
    for name, value in steps:
        twin = through_json(buffer, config)  # 6
        match name:
            case "note":
                buffer.note(value)
                twin.note(value)
                buffered += model.note(value)
            case "take":
                (fraction, room), size = value, len(buffer)
                found = buffer.take(fraction, room)
                assert found == model.take(fraction, room) == twin.take(fraction, room)  # 3
                most = max(0, min(size, room, config.max_groups))
                assert len(found) == (most if fraction >= config.start_fraction else 0)
                assert all(1 <= attempt <= config.max_attempts for _, attempt in found)  # 2
                assert not dict(found).keys() & dict(buffer.state()["waiting"]).keys()
                issued += len(found)
            case "reload":
                buffer = twin
        assert twin.state() == buffer.state() == through_json(buffer, config).state()  # 6
        waiting = [tuple(x) for x in buffer.state()["waiting"]]
        assert waiting == model.waiting  # 4
        # 1
        assert len(buffer) == len(waiting) == len({prompt_id for prompt_id, _ in waiting}) <= config.capacity_prompts
        assert all(attempt < config.max_attempts for _, attempt in waiting)  # 2
        assert (buffer.num_buffered, buffer.num_issued) == (buffered, issued)  # 5


@SETTINGS
@given(config=configs, steps=st.lists(operations, min_size=4, max_size=16))
def test_invariants(config: RerollConfig, steps: list) -> None:
    assert_invariants(config, steps)


def test_a_smaller_buffer_and_fewer_attempts_load_what_still_fits() -> None:
    large = RerollBuffer(RerollConfig(max_groups=4, max_attempts=5))
    large.note([("a", 0), ("b", 3), ("c", 1), ("d", 0)])
    small = RerollBuffer(RerollConfig(max_groups=4, max_attempts=3, capacity_prompts=2))
    small.load_state(json.loads(json.dumps(large.state())))
    small.load_state(json.loads(json.dumps(large.state())))  # the state replaces the entries that it had
    assert small.take(1.0, room=9) == [("c", 2), ("d", 1)]
    assert (small.num_buffered, small.num_issued) == (4, 2)
    small.note([("e", 0)])
    small.load_state({"waiting": [], "num_buffered": 9, "num_issued": 7})
    assert (len(small), small.num_buffered, small.num_issued) == (0, 9, 7)


@SETTINGS
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(0, 14), threshold=st.sampled_from([0.0, 0.3, -1.0]))
def test_failed_groups_equal_a_loop(seed: int, count: int, threshold: float) -> None:
    random = np.random.default_rng(seed)
    totals, groups = random.choice([math.nan, 0.0, -0.0, 0.3, 1.0, -1.0], count), random.choice([7, 0, 3, 40, 5], count)
    wanted = []
    for group in sorted(set(groups.tolist())):
        rewards = [x for x, g in zip(totals.tolist(), groups.tolist(), strict=True) if g == group and not math.isnan(x)]
        if rewards and all(x <= threshold for x in rewards):
            wanted.append(group)
    found = failed_groups(totals, groups, threshold)
    assert found.dtype == np.int64 and found.tolist() == wanted
