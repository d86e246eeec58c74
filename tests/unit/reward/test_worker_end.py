"""The end of reward workers and of all that they started, and the environment variables that they get."""

import contextlib
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from megatron_rl.errors import ConfigError
from tests.pairwise import pairwise
from tests.patience import HANG_S, patient, until
from tests.unit.reward.rig import SHORT_S, groups_of, is_alive, reward_of, totals

pytestmark = pytest.mark.process

ROOT = pathlib.Path(__file__).parents[3]


def test_close_ends_the_workers_and_may_be_called_again():
    with reward_of("act", num_workers=2) as reward:
        pids = reward.pool.pids
        assert len(set(pids)) == 2 and all(map(is_alive, pids))
        for _ in range(2):
            reward.close()
            assert not any(map(is_alive, pids))
        with pytest.raises(RuntimeError, match="workers are closed"):
            reward.score(groups_of(["a"]))


@pytest.mark.parametrize(
    ("how", "child_of"),
    pairwise(("closed", "killed", "itself"), ("leaves_a_child", "leaves_a_session"), strength=1),
)
def test_what_a_function_started_ends_with_its_worker(only_endless, child_of, how):
    with reward_of(child_of, "act", deadline_s=SHORT_S) as reward:
        scores = reward.score(groups_of([{"closed": "a", "killed": "hang", "itself": "kill"}[how]]))
        child = int(scores[0].by_function[0])
        assert is_alive(child) if how == "closed" else until(lambda: not is_alive(child))
    assert until(lambda: not is_alive(child))


@contextlib.contextmanager
def killed_rank(score: str) -> Iterator[subprocess.Popen]:
    """Start a rank that runs a line with a Reward open, and kill it behind the body."""
    code = f"""
import threading
from tests.unit.reward.rig import SHORT_S, groups_of, reward_of, totals
with {score}
    threading.Event().wait(3600)
"""
    rank = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        yield rank
    finally:
        rank.kill()
        rank.wait(patient(HANG_S))
        rank.stdout.close()


def test_a_daemon_of_a_function_ends_with_a_killed_rank():
    score = """reward_of("leaves_a_session") as reward:
    print(*reward.pool.pids, *map(int, totals(reward.score(groups_of(["a"])))), flush=True)"""
    with killed_rank(score) as rank:
        pids = [int(name) for name in rank.stdout.readline().split()]
        assert len(pids) == 2 and all(map(is_alive, pids))
    assert until(lambda: not any(map(is_alive, pids)))


def test_a_worker_gets_no_keys_but_those_that_are_named(monkeypatch):
    names = ["PATH", "HOME", "LC_ALL", "OMP_NUM_THREADS", "MASTER_PORT"]
    keys = ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "HTTPS_PROXY", "VLLM_API_KEY", "JUDGE_KEY"]
    for name in ["LC_ALL", "OMP_NUM_THREADS", "MASTER_PORT", *keys]:
        monkeypatch.setenv(name, "1")
    with reward_of("variables", worker_environment=("JUDGE_KEY",)) as reward:
        assert totals(reward.score(groups_of(names + keys))) == [1.0] * 4 + [0.0] * 6 + [1.0]
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match="reward.worker_environment names 'JUDGE_KEY', which is not set"):
        reward_of("variables", worker_environment=("JUDGE_KEY",)).__enter__()


@pytest.mark.parametrize("word", ["a", "hang", "spin"])
def test_workers_end_with_a_killed_rank(word, tmp_path):
    """Be they idle, asleep, or holding the interpreter's lock; the last two leave a file each when they begin."""
    text = f"{word} {tmp_path}"
    score = f"""reward_of("act", num_workers=2, deadline_s=3600) as reward:
    print(*reward.pool.pids, flush=True)
    reward.score(groups_of([{text!r}], [{text!r}]))
    print("scored", flush=True)"""
    with killed_rank(score) as rank:
        pids = [int(name) for name in rank.stdout.readline().split()]
        if word == "a":
            assert rank.stdout.readline() == "scored\n"
        else:
            assert until(lambda: len(list(tmp_path.iterdir())) == 2)
        assert len(pids) == 2 and all(map(is_alive, pids))
    assert until(lambda: not any(map(is_alive, pids)))
