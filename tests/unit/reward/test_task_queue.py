"""reward/task_queue.py, without processes or time: whatever takes long, answers, raises or dies, and in any order."""

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.reward.function import Outcome
from megatron_rl.reward.task_queue import Failure, Task, TaskQueue
from megatron_rl.types import Rollout
from tests.unit.reward.rig import groups_of

WHOLE, ALONE = 1.0, 2.0  # the values that a sample gets from its group's call, and from a call of its own


class Run:
    """A queue whose tasks end as a test says: with a sample of ``guilty``, and the group's call of ``failing``."""

    def __init__(self, rollouts: Sequence[Rollout], guilty: dict[int, Failure], failing: dict[str, Failure]) -> None:
        self.work, self.rollouts, self.guilty, self.failing = TaskQueue(rollouts, 1), rollouts, guilty, failing
        self.running: list[Task] = []
        self.failed_whole: list[tuple[Task, Failure]] = []

    def end(self, task: Task) -> None:
        self.running.remove(task)
        failures = [self.guilty[sample] for sample in task.samples if sample in self.guilty]
        if len(task.samples) > 1 and (name := self.rollouts[task.samples[0]].prompt.name) in self.failing:
            failures.append(self.failing[name])
        if failures:
            self.failed_whole += [(task, failures[0])] if len(task.samples) > 1 else []
            self.work.failed(task, failures[0], "said")
        else:
            value = WHOLE if len(task.samples) > 1 else ALONE
            self.work.answered(task, [Outcome(value=value)] * len(task.samples))

    def act(self, choose) -> None:
        """Begin, suspect or end a task."""
        acts = [lambda task=task: self.end(task) for task in self.running]
        acts += [lambda task=task: self.work.suspect(task) for task in self.running]
        if self.work.num_waiting:
            acts.append(lambda: self.running.append(self.work.next()))
        if self.work.num_early:
            acts.append(lambda: self.running.append(self.work.next_early()))
        choose(acts)()


FAILURES = st.sampled_from(Failure)


@given(st.data(), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_a_suspicion_changes_no_result(data, sizes) -> None:
    """Guilty samples fail and no others; a group that answers gives its own values, whatever was tried beside it."""
    rollouts = groups_of(*(["x"] * size for size in sizes))
    guilty = data.draw(st.dictionaries(st.integers(0, len(rollouts) - 1), FAILURES, max_size=3))
    names = sorted({rollout.prompt.name for rollout in rollouts})
    run = Run(rollouts, guilty, data.draw(st.dictionaries(st.sampled_from(names), FAILURES, max_size=2)))
    for _ in range(200):
        if run.work.done:
            break
        run.act(lambda acts: data.draw(st.sampled_from(acts)))
    while not run.work.done:  # the rest in order
        (run.end if run.running else lambda _: run.running.append(run.work.next()))((run.running or [None])[0])
    bad = {rollouts[sample].prompt.name for sample in guilty} | set(run.failing)
    for sample, outcome in enumerate(run.work.outcomes[0]):
        name = rollouts[sample].prompt.name
        whole = name not in bad and sum(rollout.prompt.name == name for rollout in rollouts) > 1
        assert outcome == (Outcome(error="said") if sample in guilty else Outcome(value=WHOLE if whole else ALONE))
    assert run.work.has_failed == bool(guilty)
    # Only tasks that failed are reported, each once.
    assert [(split.task, split.failure) for split in run.work.splits] == run.failed_whole
    late = [task.samples for task, failure in run.failed_whole if failure is Failure.OVERDUE]
    slow = [len(samples) for samples in late if not {*samples} & {*guilty}]
    assert run.work.slow_samples() == min(slow, default=None)


def test_a_sample_is_not_guilty_before_its_group_has_failed() -> None:
    """A single call that fails ends nothing while the group's may answer; once that fails, it counts at once."""
    run = Run(groups_of(["a", "b"], ["c", "d"]), {1: Failure.RAISED, 2: Failure.RAISED}, {})
    first, second = run.work.next(), run.work.next()
    run.work.suspect(first)
    run.work.suspect(second)
    singles = [run.work.next_early() for _ in range(4)]
    assert [single.samples for single in singles] == [[0], [1], [2], [3]] and not run.work.num_waiting
    run.running += [first, second, *singles]
    for single in singles[:3]:
        run.end(single)
    assert not run.work.has_failed and run.work.num_suspected == 2
    run.end(second)
    assert run.work.has_failed and run.work.num_suspected == 1 and run.work.outcomes[0][2] == Outcome(error="said")
    run.work.answered(first, [Outcome(value=WHOLE)] * 2)  # which raises alone, and not in its group
    run.end(singles[3])
    assert run.work.done and run.work.outcomes[0][:2] == [Outcome(value=WHOLE)] * 2
    assert [split.task for split in run.work.splits] == [second]


def test_samples_of_a_group_that_answered_are_moot() -> None:
    run = Run(groups_of(["a", "b", "c"]), {}, {})
    group = run.work.next()
    run.work.suspect(group)
    single = run.work.next_early()
    assert single.is_early and not single.is_moot
    run.work.answered(group, [Outcome(value=WHOLE)] * 3)
    assert single.is_moot and run.work.done and not run.work.num_early
    run.work.failed(single, Failure.DIED, "said")  # tried once more by nobody
    assert not run.work.num_early and not run.work.num_waiting and not run.work.splits


def test_a_sample_that_is_never_judged_is_worth_nothing_under_some_functions():
    for failure, lost_is_wrong in itertools.product(Failure, ((), (0,))):
        work = TaskQueue(groups_of(["a"]), 1, lost_is_wrong=lost_is_wrong)
        while work.num_waiting:
            work.failed(work.next(), failure, "said")
        is_wrong = lost_is_wrong and failure is not Failure.RAISED
        assert work.done and work.outcomes == [[Outcome(value=0.0) if is_wrong else Outcome(error="said")]]
