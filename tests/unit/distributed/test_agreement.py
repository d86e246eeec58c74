"""Ranks that cannot start agree on one message, or name the port; a failed backend leaves no groups behind."""

import contextlib
import io
import json
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from megatron_rl.config import ParallelConfig
from megatron_rl.distributed import agreement, rendezvous, topology
from megatron_rl.distributed.agreement import Job
from megatron_rl.distributed.rendezvous import meet
from megatron_rl.errors import ConfigError, PeerError
from tests.patience import patient
from tests.runs.command import arguments, command_line
from tests.workers.environment import TORCHRUN, worker_environment

ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    messages: list[str] = []
    monkeypatch.setattr(agreement, "_print", messages.append)
    return messages


def jobs(size: int, grace_s: float = 30.0) -> list[Job]:
    store = dist.HashStore()
    return [Job(rank=rank, size=size, store=store, grace_s=grace_s) for rank in range(size)]


def on_threads(*calls) -> list:
    """Run the calls at the same time; return what each returned or raised."""

    def outcome(call):
        try:
            return call()
        except Exception as error:  # noqa: BLE001 (it is what the test looks at)
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(timeout=60) for future in [pool.submit(outcome, call) for call in calls]]


def test_ranks_that_meet_go_on_each_time_and_one_that_never_comes_is_named(printed: list[str]) -> None:
    ranks = jobs(3)
    for _ in range(3):
        assert on_threads(*(lambda job=job: job.wait_for_all(30) for job in ranks)) == [None] * 3
    assert ranks[0].round == 3 and not printed
    with pytest.raises(PeerError, match=r"rank 0 waited 0\.1 s \(run.deadline_s\) for all 2 ranks"):
        jobs(2)[0].wait_for_all(0.1)


def test_a_message_of_every_rank_is_printed_once_by_rank_0_before_any_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 prints while the others, which have met the message too, have not left."""
    ranks, left, printed = jobs(3), [], []
    monkeypatch.setattr(agreement, "_print", lambda message: printed.append((message, list(left))))

    def meet(job: Job) -> None:
        job.print_once("lr=nan")
        left.append(job.rank)

    on_threads(*(lambda job=job: meet(job) for job in ranks))
    assert printed == [("lr=nan", [])] and sorted(left) == [0, 1, 2]


def test_rank_0_prints_what_another_rank_met(printed: list[str]) -> None:
    ranks = jobs(3)

    def start(job: Job) -> None:
        try:
            job.wait_for_all(30)
        except ConfigError as error:
            job.print_once(str(error))
            raise

    first, second = (lambda job=job: start(job) for job in ranks[:2])
    outcomes = on_threads(first, second, lambda: ranks[2].print_once("a.jsonl is missing"))
    assert [type(outcome) for outcome in outcomes] == [ConfigError, ConfigError, type(None)]
    assert on_threads(*(lambda job=job: job.wait_for_all(30) for job in ranks)) == [None] * 3  # another run may start
    assert len(printed) == 1 and printed[0].startswith("rank 2 on ") and printed[0].endswith(": a.jsonl is missing")


def test_where_rank_0_is_elsewhere_one_of_the_others_prints(printed: list[str]) -> None:
    ranks = jobs(4, grace_s=0.2)
    on_threads(*(lambda job=job: job.print_once("no room") for job in ranks[1:]))
    assert len(printed) == 1 and printed[0].endswith(": no room") and printed[0].startswith("rank ")


def test_a_process_alone_prints_at_once_and_a_long_message_is_cut(capsys, monkeypatch, tmp_path) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    agreement.announce("x" * 10_000)
    said = capsys.readouterr().err
    assert said.startswith("megatron_rl: xxx") and said.endswith("x… (10000 characters)\n") and len(said) < 4100
    report = json.loads((tmp_path / "error.json").read_text())
    assert report["message"]["message"] in said and int(report["message"]["extraInfo"]["timestamp"]) > 0


def one_rank_lacks_its_data(rank: int, world: int, given: list[str], lacking: int) -> tuple[int, str]:
    name = "gone.jsonl" if rank == lacking else "train.jsonl"
    return command_line(rank, world, [part.replace("train.jsonl", name) for part in given])


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_file_that_one_host_lacks_ends_all_ranks_with_one_message(pool, arithmetic, tmp_path, lacking) -> None:
    given = arguments(arithmetic, tmp_path)
    results = pool.run(2, one_rank_lacks_its_data, given, lacking, timeout_s=60)
    assert [code for code, _ in results] == [2, 2], results
    assert results[1][1] == "" and results[0][1].count("gone.jsonl") == 1, results
    assert ("rank 1 on " in results[0][1]) == (lacking == 1)


def _without_objective(config):
    """Build a backend whose loss, the last of what it is made of, cannot be made."""
    from megatron_rl.backend import MegatronBackend, backend

    def fails(loss, sum_over_context):
        raise RuntimeError("no objective")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "Objective", fails)
        return MegatronBackend(config)


def builds_again(rank: int, world: int, folder: str, has_world: bool, part: str) -> tuple[str, bool, int, int]:
    """Return a failed construction's error, whether a world stayed, its groups, and a second one's stages.

    part: ``weights``, which the model lacks, or ``objective``, which cannot be made.
    """
    from megatron_rl.backend import MegatronBackend
    from megatron_rl.config import load_config

    if not has_world:
        dist.destroy_process_group()
    config = load_config(None, [f"model.hf_path={folder}/model", "run.deadline_s=60"])
    broken = {"weights": lambda: MegatronBackend(config, weights={}), "objective": lambda: _without_objective(config)}
    with contextlib.redirect_stderr(io.StringIO()), pytest.raises(Exception) as error:
        broken[part]()
    stays = dist.is_initialized()
    groups = len(dist.distributed_c10d._world.pg_map)
    backend = MegatronBackend(config)
    stages = backend.topology.pipeline_size
    backend.close(leave_world=not has_world)
    return str(error.value), stays, groups, stages


@pytest.mark.parametrize(
    ("has_world", "part", "named"),
    [(True, "weights", "embed_tokens"), (False, "weights", "embed_tokens"), (True, "objective", "no objective")],
)
def test_a_backend_that_failed_leaves_no_groups_and_another_is_built(pool, arithmetic, has_world, part, named) -> None:
    ((said, stays, groups, stages),) = pool.run(1, builds_again, str(arithmetic), has_world, part, timeout_s=60)
    assert named in said and (stays, groups, stages) == (has_world, int(has_world), 1)


def joined(rank: int, world: int, folder: str) -> tuple[int, int]:
    """Join a grid in which the last rank is slow; return how many groups it had made then, and in the end."""
    made, c10d = pathlib.Path(folder), dist.distributed_c10d

    class Slow(c10d.ProcessGroupGloo):
        def __init__(self, *given, **named) -> None:
            super().__init__(*given, **named)
            time.sleep(0.1)
            (made / str(len(list(made.iterdir())))).touch()

    with pytest.MonkeyPatch.context() as patch:
        if rank == world - 1:
            patch.setattr(c10d, "ProcessGroupGloo", Slow)
        topology.initialize(ParallelConfig(tensor=world), deadline_s=30)
    found = len(list(made.iterdir()))
    dist.barrier()
    return found, len(list(made.iterdir()))


def test_no_rank_goes_on_before_the_last_has_connected(pool, tmp_path) -> None:
    """A rank that refused its settings and ended sooner would break the others' connecting."""
    for found, whole in pool.run(3, joined, str(tmp_path), timeout_s=60):
        assert found == whole > 1


@pytest.mark.long(seconds=20)
@pytest.mark.distributed
def test_under_torchrun_the_message_is_seen_once_above_its_report_and_in_it() -> None:
    command = [sys.executable, "-m", *TORCHRUN, "2", "-m", "megatron_rl.train", "train.steps=3"]
    given = {"cwd": ROOT, "env": worker_environment(), "timeout": patient(120.0), "check": False}
    done = subprocess.run(command, capture_output=True, text=True, **given)
    said = done.stderr
    assert done.returncode == 1 and "exitcode  : 2" in said, said  # torchrun's own code is always 1
    told = "on the command line: config key train.steps (value 3) is called train.num_rollouts now"
    assert said.count(f"megatron_rl: {told}") == 1, said
    assert f"traceback : {told}" in said.partition("Root Cause")[2], said


# --- the port where they meet

SHORT_S = 1.0  # a deadline that is met here


@pytest.fixture
def taken(monkeypatch) -> Iterator[int]:
    """Hold MASTER_PORT: connections are accepted, by the kernel, and never answered."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(port)), ("WORLD_SIZE", "2")):
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("RANK", "1")
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        yield port


def test_a_mute_port_and_one_that_is_taken_end_the_wait_by_name(taken, monkeypatch) -> None:
    monkeypatch.setattr(rendezvous, "GRACE_S", 0.1)
    with pytest.raises(PeerError, match=rf"rank 1 of 2 .*:{taken} .*within 1 s .run.deadline_s.: .*does not answer"):
        meet(SHORT_S)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(PeerError, match=rf"rank 0 of 2 .* 127\.0\.0\.1:{taken} .*EADDRINUSE.*another MASTER_PORT"):
        meet(SHORT_S)


def test_a_rank_that_never_comes_ends_the_wait(taken, monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = listener.getsockname()[1]
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_PORT", str(free))
    with pytest.raises(PeerError, match=rf"rank 0 of 2 .* 127\.0\.0\.1:{free} .*1/2 clients joined.*did not start"):
        meet(SHORT_S)


def test_a_name_without_an_address_and_a_launcher_that_names_no_port_are_named(taken, monkeypatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "no such host")
    with pytest.raises(PeerError, match=r"at no such host:\d+ .*; no such host has no address on this host: give it a"):
        meet(SHORT_S)
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(PeerError, match=r"at no such host:\? .*MASTER_PORT expected, but not set"):
        meet(SHORT_S)
