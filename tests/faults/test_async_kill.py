"""A run with rollouts ahead that is killed, or told to leave, while a thread generates, ends with the same bits.

It does so when it is started again. The machinery is the study's own (kill_study.py); its table of kills is made by
``python -m tests.faults.kill_study --layout streaming``.
"""

import json
import pathlib
import signal
from types import SimpleNamespace

import psutil
import pytest

from megatron_rl.checkpoint.folder import name_of, verify, whole_checkpoints
from megatron_rl.cli import EXIT_PREEMPTED
from tests.faults import kill_study
from tests.patience import until
from tests.runs.command import firsts_of, reward_workers, rows_of, trained_prompts

pytestmark = pytest.mark.distributed
UNHELPED = "reward.num_workers=0"  # ranks that score themselves reward the same


@pytest.fixture(scope="module")
def streaming(nursery, tmp_path_factory) -> SimpleNamespace:
    """Return a run that went to its end, with the inputs and the nursery to make another one like it."""
    folder = tmp_path_factory.mktemp("streaming")
    inputs = kill_study.make_inputs(folder / "inputs")
    whole = kill_study.whole_run(nursery, inputs, folder / "whole", "streaming", UNHELPED)
    return SimpleNamespace(nursery=nursery, inputs=inputs, whole=whole)


def lines(run_dir: pathlib.Path) -> list[str]:
    path = run_dir / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def assert_no_orphans() -> None:
    """Assert that no reward worker on this host has lost its rank: it is killed with that."""
    assert until(lambda: all(psutil.pid_exists(int(words[-1])) for words in reward_workers()))


def test_a_run_ahead_that_is_killed_ends_with_the_same_bits(streaming, tmp_path):
    """One rank is killed at half of the rows; the undisturbed run is stale, replays and asks again."""
    rows = firsts_of(streaming.whole.folder / "run", "async/staleness_max")
    assert [row["async/staleness_max"] for row in rows] == [0.0, *[2.0] * (len(rows) - 1)]
    assert rows[-1]["reroll/issued"] > 2 and sum(row["replay/replaced"] for row in rows) > 2
    command = [str(tmp_path / "notes"), *kill_study.arguments_of(streaming.inputs, tmp_path / "run", "streaming")]
    half = len(rows_of(streaming.whole.folder / "run")) // 2
    kill = kill_study.Kill(seconds=streaming.whole.seconds / 2, ranks=(0,))
    when = {"when": lambda: len(lines(tmp_path / "run")) >= half}
    outcome = kill_study.kill_once(kill, streaming.nursery, command, tmp_path, streaming.whole, **when)
    assert outcome is not None and outcome.differs == () and outcome.codes == (-signal.SIGKILL, 1), outcome
    assert_no_orphans()


@pytest.mark.long(seconds=30)
def test_a_signal_while_a_thread_generates_saves_what_is_ahead(streaming, tmp_path):
    """All leave with 75 and a checkpoint off schedule that holds the rollout ahead, and the same command goes on."""
    notes, run_dir = tmp_path / "notes", tmp_path / "run"
    given = (UNHELPED, "checkpoint.save_every_rollouts=1000")
    command = [str(notes), *kill_study.arguments_of(streaming.inputs, run_dir, "streaming", *given)]
    with kill_study.attempt(streaming.nursery, command, tmp_path / "first") as ranks:
        until(lambda: not ranks.run() or len(lines(run_dir)) > 2 and kill_study.generates(notes, 1))
        ranks.forks[1].send_signal(signal.SIGTERM)
        assert ranks.wait(kill_study.BOUND_S) == [EXIT_PREEMPTED] * 2 == [75] * 2, ranks.said()
        assert "rank 1: SIGTERM: the step in progress is finished" in ranks.said()
    start, saved = whole_checkpoints(run_dir / "checkpoints")
    folder = run_dir / "checkpoints" / name_of(saved)
    verify(folder)
    feed = json.loads((folder / "state.json").read_text())["feed"]
    assert start == 0 and list(feed["jobs"]) == [str(saved)] and feed["next_rollout"] == saved + 1, feed
    assert len(firsts_of(run_dir, "async/staleness_max")) == saved
    with kill_study.attempt(streaming.nursery, command, tmp_path / "second") as ranks:
        assert ranks.wait(kill_study.BOUND_S) == [0] * 2, ranks.said()
    assert kill_study.differences(streaming.whole.folder, tmp_path) == []


@pytest.mark.long(seconds=120)
@pytest.mark.parametrize(("layout", "seed"), [("streaming", 11), ("prefetch", 12)])
def test_eight_kills_of_a_run_ahead(nursery, tmp_path, layout, seed):
    """Without replay an epoch's prompts are all trained, each once."""
    whole, outcomes = kill_study.study(nursery, 8, seed, layout, tmp_path)
    assert len(outcomes) == 8 and not any(outcome.differs for outcome in outcomes), outcomes
    assert any(outcome.ahead for outcome in outcomes) and any(outcome.resumed for outcome in outcomes), outcomes
    if layout == "prefetch":
        assert sorted(trained_prompts(whole.folder / "run")) == sorted(f"{row}@0" for row in range(kill_study.EPOCH))
    assert_no_orphans()


@pytest.mark.long(seconds=70)
@pytest.mark.parametrize("layout", ["PP2", "DP2-KL", "PP2-KL-device"])
def test_a_killed_run_started_again_ends_with_the_same_bits(nursery, tmp_path, layout):
    """It has pipeline stages, and a reference that is renewed under an adaptive coefficient."""
    _, outcomes = kill_study.study(nursery, 4, 1, layout, tmp_path)
    assert len(outcomes) == 4 and not any(outcome.differs for outcome in outcomes), outcomes
