"""Rollouts, rewards and workers for the tests of reward workers (test_pool.py)."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Mapping, Sequence

from megatron_rl.config import RewardConfig
from megatron_rl.reward import Reward
from megatron_rl.reward.task_queue import Task
from megatron_rl.reward.worker_handle import WorkerProcess
from megatron_rl.types import Prompt, Rollout, Score
from tests.patience import HANG_S, patient, until
from tests.unit.reward.worker_rewards import never_ends

HERE = "tests.unit.reward.worker_rewards"
SHORT_S = 0.2  # a deadline that only a sample that never ends reaches


def rollout_of(
    prompt: Prompt, sample_index: int, response_ids: Sequence[int], text: str = "", finish_reason: str = "stop"
) -> Rollout:
    return Rollout(
        prompt=prompt,
        sample_index=sample_index,
        response_ids=tuple(response_ids),
        logprobs=(0.0,) * len(response_ids),
        text=text,
        finish_reason=finish_reason,
        weight_versions=((0, len(response_ids)),),
    )


def groups_of(*groups: Sequence[str], **columns) -> list[Rollout]:
    """Make one prompt per group of completion texts; a column's value is f(number of the group)."""
    rollouts = []
    for number, texts in enumerate(groups):
        row = {"answer": str(number)} | {key: of(number) for key, of in columns.items()}
        prompt = Prompt(prompt_id=f"{number}@0", text=f"prompt {number}", token_ids=(1,), columns=row)
        rollouts += [rollout_of(prompt, index, [*map(ord, text[:3])], text) for index, text in enumerate(texts)]
    return rollouts


@contextlib.contextmanager
def reward_of(
    *names: str, num_workers: int = 1, on_error: str = "drop", deadline_s: float | None = None, **settings
) -> Iterator[Reward]:
    """Open a Reward of functions of worker_rewards.py; without ``deadline_s`` no sample meets one on any host."""
    names = tuple(name if ":" in name or name in ("arithmetic", "math_verify") else f"{HERE}:{name}" for name in names)
    settings["deadline_s"] = patient(HANG_S) if deadline_s is None else deadline_s
    reward = Reward(RewardConfig(functions=names, num_workers=num_workers, on_error=on_error, **settings))
    try:
        yield reward
    finally:
        reward.close()


def with_environment(rollouts, *values, excluded=()) -> list[Rollout]:
    """Give each rollout its environment's reward; take out those of the indices ``excluded``."""
    return [
        dataclasses.replace(x, environment_reward=value, excluded="it hung" if k in excluded else None)
        for k, (x, value) in enumerate(zip(rollouts, values, strict=True))
    ]


def totals(scores: Sequence[Score]) -> list[float | None]:
    return [score.total for score in scores]


def is_alive(pid: int) -> bool:
    """Say whether a process runs; a zombie has ended and waits for its parent to notice."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class OnlyEndless(WorkerProcess):
    """A worker whose tasks meet their deadline only where they never end: a loaded host may hold up any other.

    The place where a task stood is read once it is written, which such a host may put off beyond the deadline.
    """

    def give(self, task: Task, task_id: int, message: Mapping[str, object]) -> None:
        super().give(task, task_id, message)
        if not never_ends(message["function"], message["completions"]):
            self.deadline += patient(HANG_S)

    def stacks(self) -> str:
        until(super().stacks)
        return super().stacks()
