"""reward/ in workers: their answers equal those of the rank's own process; no sample holds up the others."""

import os
import pathlib
import select
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_rl.config import RewardConfig
from megatron_rl.distributed.frames import Inbox, encode, is_json
from megatron_rl.errors import ConfigError, RewardError
from megatron_rl.reward import pool as pool_module
from megatron_rl.types import Rollout
from tests.pairwise import pairwise
from tests.patience import HANG_S, patient, until
from tests.unit.reward.rig import HERE, SHORT_S, groups_of, is_alive, reward_of, totals

pytestmark = pytest.mark.process

ROOT = pathlib.Path(__file__).parents[3]
# --- equalities


def test_workers_equal_the_main_process():
    """Values, failures and their tracebacks, None, weights and order equal, over two functions."""
    texts = [["a", "bc", "nan", "\x01"], ["raise x", "d", "base"], ["\ud800 é 漢", "none", ""], ["f"] * 5]
    columns = {"level": lambda n: [n, {"x": None, "y": [1.5, float("inf")]}], "big": lambda n: 10**30 + n}
    rollouts = groups_of(*texts, **columns, pi=lambda n: 0.1 * n)
    rollouts[4].prompt.columns["only_here"] = True
    names, weights = ("act", "everything"), (0.3, 1.7)
    for on_error in ("drop", "zero"):
        with (
            reward_of(*names, weights=weights, on_error=on_error, num_workers=2) as apart,
            reward_of(*names, weights=weights, on_error=on_error, num_workers=0) as here,
        ):
            assert apart.score(rollouts) == here.score(rollouts)
            assert len(apart.last_errors) == 3 and apart.last_errors == here.last_errors
            assert apart.score(rollouts[7:]) == here.score(rollouts[7:]) and apart.last_errors == here.last_errors == ()


def test_math_verify_in_workers_equals_the_main_process():
    texts = ["#### 72", "#### 71", "\\boxed{\\frac{1}{2}}", "", "The answer is $\\frac{2}{4}$.", "#### 1,000"]
    rollouts = groups_of(*[texts] * 4, answer=lambda n: ["72", "0.5", "1000", "71"][n])
    with reward_of("math_verify", num_workers=2) as apart, reward_of("math_verify", num_workers=0) as here:
        assert apart.score(rollouts) == here.score(rollouts)


def test_math_verify_counts_a_sample_as_wrong_that_its_worker_does_not_judge(caplog, monkeypatch):
    monkeypatch.setattr(pool_module, "MATH", f"{HERE}:act")
    with reward_of("act", deadline_s=SHORT_S, on_error="fail") as reward:
        assert totals(reward.score(groups_of(["hang"], ["a"]))) == [0.0, 1.0] and reward.last_errors == ()
    assert [r.args[0] for r in caplog.records if "counts as wrong" in r.getMessage()] == ["0@0#0"]


def test_failing_equals_the_main_process():
    rollouts = groups_of(["a", "raise it"], ["raise again", "b"])
    with reward_of("act", on_error="fail") as apart, reward_of("act", on_error="fail", num_workers=0) as here:
        with pytest.raises(RewardError, match="(?s)sample 0@0#1 .1 of 4 .*RuntimeError: no reward for") as met:
            apart.score(rollouts)
        with pytest.raises(RewardError) as expected:
            here.score(rollouts)
        assert str(met.value) == str(expected.value)
        assert totals(apart.score(groups_of(["a"]))) == [1.0]


def test_async_equals_plain():
    rollouts = groups_of(["a", "raise x", "bc"], ["none", "d"])
    for num_workers in (0, 1):
        with reward_of("act_async", num_workers=num_workers) as reward, reward_of("act", num_workers=0) as plain:
            assert reward.score(rollouts) == plain.score(rollouts)
            assert [failure.sample_id for failure in reward.last_errors] == ["0@0#1"]


def test_a_stream_in_pieces_equals_its_messages():
    messages = [{"id": 1, "x": "é\ud800"}, {}, {"values": [None, -0.0, 0.1, 10**40]}]
    stream, inbox = b"".join(map(encode, messages)), Inbox()
    assert [message for byte in stream for message in inbox.take(bytes([byte]))] == messages
    with pytest.raises(ValueError, match="the stream holds no frames"):
        Inbox().take(b"\xff" * 16)
    assert is_json({"a": [1, None, {"b": 2.5}]}) and not is_json({1: 2}) and not is_json([(1,)]) and not is_json({1})


# --- where a function runs


def test_a_worker_is_a_process_of_its_own(monkeypatch):
    """It has no torch and nothing of torchrun; signals do not end it, though they end the processes that it starts."""
    monkeypatch.setenv("RANK", "0")
    names = ("has_torch", "is_main_thread", "group_size", "rank_variables", "stays_when_asked", "process_number")
    with reward_of(*names) as reward:
        scores = reward.score(groups_of(["a", "b", "c"], ["d"]))
        pid = float(reward.pool.pids[0])
        wanted = [(0.0, 1.0, size, 0.0, 1.0, pid) for size in (3.0, 3.0, 3.0, 1.0)]
        assert [score.by_function for score in scores] == wanted
        assert reward.pool.num_started == 1 and pid != os.getpid()


def test_in_process_is_by_choice():
    with reward_of("process_number", "group_size", in_process=(f"{HERE}:process_number",)) as reward:
        scores = reward.score(groups_of(["a", "b"], ["c"]))
        assert [score.by_function for score in scores] == [(os.getpid(), 2.0), (os.getpid(), 2.0), (os.getpid(), 1.0)]
    with pytest.raises(ConfigError, match="reward.in_process='x' is not known; choose one of arithmetic"):
        RewardConfig(functions=("arithmetic",), in_process=("x",))
    with pytest.raises(ConfigError, match="nothing for reward.num_workers=2"):
        RewardConfig(functions=("arithmetic",), in_process=("arithmetic",), num_workers=2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module_here:f", "'no_such_module_here:f'.*ModuleNotFoundError.*reward worker.*reward.in_process"),
        (f"{HERE}:actt", "has no 'actt'; the nearest it has is 'act'.*reward worker"),
        ("exits_when_imported:f", "'exits_when_imported:f'.*SystemExit.*reward.in_process"),
        ("killed_when_imported:f", "ended before it was ready .signal SIGKILL.* 3 times in a row"),
    ],
)
def test_what_a_worker_cannot_import_is_an_error_at_start(tmp_path, monkeypatch, name, message):
    (tmp_path / "exits_when_imported.py").write_text("raise SystemExit(2)")
    (tmp_path / "killed_when_imported.py").write_text("import os; os.kill(os.getpid(), 9)")
    monkeypatch.syspath_prepend(str(tmp_path))  # the path of this process: workers look where it looks
    with pytest.raises((ConfigError, RewardError), match=f"(?s){message}"), reward_of(name):
        pass


def test_columns_that_a_function_or_a_socket_cannot_take():
    with reward_of("needs_missing") as reward:
        with pytest.raises(ConfigError, match="cannot be called: missing a required argument: 'missing'"):
            reward.score(groups_of(["a"]))
        with pytest.raises(ConfigError, match=r"column 'pair' of prompt 0@0 is \(1, 2\).*reward.in_process"):
            reward.score(groups_of(["a"], pair=lambda n: (1, 2)))
        assert totals(reward.score(groups_of(["a"], missing=lambda n: n))) == [0.0]


# --- who pays


FAILING = {
    "raise x": "RuntimeError: no reward for 'raise x'",
    "base": "OfBaseException: base",
    "exit": "SystemExit: 3",
    "os_exit": "os._exit(0) was called",
    "interrupt": "KeyboardInterrupt",
}


def test_exceptions_arrive_with_their_tracebacks_and_their_samples():
    with reward_of("act") as reward:
        groups = [["a", text, "bc"] for text in FAILING]
        assert totals(reward.score(groups_of(*groups, ["d"]))) == [1.0, None, 2.0] * len(FAILING) + [1.0]
        assert [failure.sample_id for failure in reward.last_errors] == [f"{i}@0#1" for i in range(len(FAILING))]
        for failure, message in zip(reward.last_errors, FAILING.values(), strict=True):
            assert message in failure.message and "worker_rewards.py" in failure.message
            assert failure.function == f"{HERE}:act"
        assert reward.pool.num_started == 1


GUILTY = {
    "hang": r"took over 0\.2 s \(reward.deadline_s\).*stood at:.*worker_rewards.py",
    "spin": r"took over 0\.2 s \(reward.deadline_s\)",
    "kill": r"killed its worker twice \(signal SIGKILL: out of memory\?\)",
}


@pytest.mark.parametrize(("text", "on_error"), pairwise(GUILTY, ("drop", "zero", "fail"), strength=1))
def test_only_the_guilty_sample_meets_on_error(only_endless, text, on_error):
    rollouts, message = groups_of(["a", text, "bc"], ["none", "d"]), GUILTY[text]
    with reward_of("act", "group_size", on_error=on_error, deadline_s=SHORT_S, num_workers=2) as reward:
        if on_error == "fail":
            with pytest.raises(RewardError, match=f"(?s)failed on sample 0@0#1 .1 of 5 samples had failed.*{message}"):
                reward.score(rollouts)
        else:
            scores = reward.score(rollouts)
            total = 0.0 if on_error == "zero" else None
            assert totals(scores) == [4.0, total, 5.0, 2.0, 3.0] and scores[1].by_function == (None, 3.0)
            assert [failure.sample_id for failure in reward.last_errors] == ["0@0#1"]
        assert totals(reward.score(groups_of(["a"], ["bc"]))) == [2.0, 3.0]


def test_under_fail_a_hanging_reward_costs_two_deadlines_and_not_two_a_sample(only_endless):
    """One worker meets the group's deadline, the next one the first sample's; nobody waits for the other 31."""
    with reward_of("act", on_error="fail", deadline_s=SHORT_S) as reward:
        with pytest.raises(RewardError, match=r"(?s)sample 0@0#0 .1 of 32 samples had failed.*took over 0\.2 s"):
            reward.score(groups_of(["hang"] * 16, ["hang"] * 16))
        assert reward.pool.num_started == 2
        assert totals(reward.score(groups_of(["a"]))) == [1.0]


def test_a_worker_that_dies_once_costs_no_sample(tmp_path):
    """The worker that replaces it scores its samples; one dies so where the machine is out of memory."""
    text = f"kill_once {tmp_path / 'done'}"
    with reward_of("act", on_error="fail") as reward:
        assert totals(reward.score(groups_of([text]))) == [float(len(text))]
        assert reward.pool.num_started == 2
    with reward_of("group_size") as reward:
        (before,) = reward.pool.pids
        os.kill(before, signal.SIGKILL)  # while it has nothing to do: no task is cut for it
        assert select.select([reward.pool._workers[0].socket], [], [], patient(HANG_S))[0]
        assert totals(reward.score(groups_of(["a"] * 3))) == [3.0] * 3
        assert before not in reward.pool.pids


def test_a_batch_without_a_guilty_sample_is_an_error():
    with reward_of("one_at_most") as reward:
        with pytest.raises(RewardError, match="(?s)2 samples .1@0#0 to 1@0#1. and on none of them alone.*0 values for"):
            reward.score(groups_of(["a"], ["b", "c"]))
        assert totals(reward.score(groups_of(["a"], ["b"]))) == [1.0, 1.0]


@pytest.mark.parametrize("num_workers", (0, 1))
@pytest.mark.parametrize(("on_error", "total"), [("drop", None), ("retry_sample", None), ("zero", 0.0)])
def test_a_batch_that_raises_without_a_guilty_sample_fails_as_configured(num_workers, on_error, total):
    """A service that fails now and then must not end a run that may lose samples."""
    with reward_of("busy_for_many", num_workers=num_workers, on_error=on_error) as reward:
        scores = reward.score(groups_of(["b", "c"]))
        assert totals(scores) == [total] * 2 and [score.by_function for score in scores] == [(None,)] * 2
        assert [x.sample_id for x in reward.last_errors] == ["0@0#0", "0@0#1"]
        assert all("2 samples (0@0#0 to 0@0#1) and on none of them alone" in x.message for x in reward.last_errors)
        assert all(score.error == "ConnectionError: busy" for score in scores)
    refused = pytest.raises(RewardError, match="(?s)and on none of them alone; mend what depends on the batch.*busy")
    with reward_of("busy_for_many", num_workers=num_workers, on_error="fail") as reward, refused:
        reward.score(groups_of(["b", "c"]))


def test_slow_together_is_not_slow_alone(only_endless):
    """Each sample meets its deadline, the four together do not; tasks are smaller from then on."""
    with reward_of("slow_above_two", on_error="fail", deadline_s=SHORT_S) as reward:
        assert totals(reward.score(groups_of(["a"] * 4))) == [1.0] * 4
        assert reward.pool.num_started == 2 and reward.pool.most_samples == 2
        assert totals(reward.score(groups_of(["a"] * 4))) == [2.0] * 4
        assert reward.pool.num_started == 2


# --- late answers, waiting, the end


def test_a_late_answer_is_nobody_elses(only_endless, tmp_path):
    """It comes while the next batch is scored, by a worker that is gone, or under a number that is not its own."""
    go = tmp_path / "go"
    with reward_of("act", deadline_s=SHORT_S) as reward:
        assert totals(reward.score(groups_of([f"wait_for {go}"]))) == [None]
        go.touch()  # the file that it would wait for, had it not been killed
        assert totals(reward.score(groups_of(["a"], ["sleep 0.3"], ["bc"]))) == [1.0, 9.0, 2.0]
        (worker,) = reward.pool._workers
        sample = {"prompt": "", "messages": None, "columns": {}, "completions": ["stale"], "completion_ids": [[]]}
        stale = {"id": 10**6, "function": f"{HERE}:act", **sample}
        worker._post(stale)
        assert totals(reward.score(groups_of(["a"]))) == [1.0]
        worker._post(stale)
        assert select.select([worker.socket], [], [], patient(HANG_S))[0]
        assert totals(reward.score(groups_of(["bc"]))) == [2.0] and reward.pool.pids == [worker.pid]


def test_what_an_error_leaves_under_way_is_ended():
    with reward_of("act", num_workers=2) as reward:
        original, calls = reward.pool._wait, []

        def interrupted(*arguments, **named):
            calls.append(arguments)
            if len(calls) == 3:
                raise KeyboardInterrupt
            original(*arguments, **named)

        reward.pool._wait = interrupted
        before = set(reward.pool.pids)
        with pytest.raises(KeyboardInterrupt):
            reward.score(groups_of(["a"], ["hang"]))
        assert len(before & set(reward.pool.pids)) == 1
        assert totals(reward.score(groups_of(["a"], ["bc"], ["def"]))) == [1.0, 2.0, 3.0]


def test_a_forked_copy_does_not_answer():
    with reward_of("forks") as reward:
        (child,) = totals(reward.score(groups_of(["a"])))
        assert until(lambda: not is_alive(int(child)))
        assert all(totals(reward.score(groups_of(["a"]))) for _ in range(3)) and reward.pool.num_started == 1


def test_waiting_takes_no_time_of_the_processor():
    """There is one wait to see who died before, and one for each answer; a loop that polls has many."""
    with reward_of("act", num_workers=2) as reward:
        selector, waits = reward.pool._selector, []
        select_whole = selector.select
        selector.select = lambda timeout: waits.append(timeout) or select_whole(timeout)
        reward.score(groups_of(["sleep 0.3"], ["sleep 0.3"]))
        assert 2 <= len(waits) <= 3, waits


def test_workers_outlive_the_thread_that_scored():
    """Linux ties a process's end to the thread that started it, and scoring may be done from any thread."""
    with reward_of("act") as reward:
        with ThreadPoolExecutor(1) as scorer:
            thread = scorer.submit(threading.get_native_id).result()
            assert totals(scorer.submit(reward.score, groups_of(["kill"])).result()) == [None]
            assert totals(scorer.submit(reward.score, groups_of(["a"])).result()) == [1.0]
        pids = reward.pool.pids
        # the thread's end would send its signal before it is gone
        assert until(lambda: not pathlib.Path(f"/proc/self/task/{thread}").exists())
        assert totals(reward.score(groups_of(["bc"]))) == [2.0]
        assert reward.pool.pids == pids and all(map(is_alive, pids))


def test_two_threads_at_a_time_are_refused(tmp_path):
    text = f"wait_for {tmp_path / 'go'}"
    with reward_of("act") as reward, ThreadPoolExecutor(1) as scorer:
        first = scorer.submit(reward.score, groups_of([text]))
        assert until(reward.pool._in_use.locked)
        with pytest.raises(RuntimeError, match="two threads"):
            reward.score(groups_of(["a"]))
        (tmp_path / "go").touch()
        assert totals(first.result()) == [len(text)]


# --- many


def misbehaving(num_samples: int, group: int, each: int) -> tuple[list[Rollout], list[float | None]]:
    """Return a batch over which ``each`` samples that raise, hang and kill are spread, and its totals under drop."""
    texts = ["x" * (1 + i * 7919 % 53) for i in range(num_samples)]
    step = num_samples // (3 * each)
    for k in range(3 * each):
        texts[k * step + k % step] = ("raise", "hang", "kill")[k % 3]
    expected = [None if text in ("raise", "hang", "kill") else float(len(text)) for text in texts]
    assert expected.count(None) == 3 * each
    return groups_of(*(texts[i : i + group] for i in range(0, num_samples, group))), expected


@pytest.mark.parametrize(
    ("num_samples", "each", "num_workers"), [(96, 1, 2), pytest.param(1000, 10, 4, marks=pytest.mark.long)]
)
def test_of_many_samples_only_the_guilty_fail(only_endless, caplog, num_samples, each, num_workers) -> None:
    """A hang costs two deadlines and two starts of a worker at most, a kill three starts; totals are in order."""
    rollouts, expected = misbehaving(num_samples, 8, each)
    with reward_of("act", num_workers=num_workers, deadline_s=SHORT_S) as reward:
        assert totals(reward.score(rollouts)) == expected
        guilty = [rollout.sample_id for rollout, total in zip(rollouts, expected, strict=True) if total is None]
        assert [failure.sample_id for failure in reward.last_errors] == guilty
        assert reward.pool.num_started <= num_workers + 5 * each
        assert each <= sum("did not answer in" in record.getMessage() for record in caplog.records) <= 2 * each
        assert totals(reward.score(rollouts[:1])) == expected[:1]
