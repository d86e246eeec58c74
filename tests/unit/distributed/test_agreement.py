"""Ranks that cannot start agree on one message, printed before any leaves; a failed backend leaves no groups behind."""

from __future__ import annotations

import contextlib
import io
import json
import pathlib
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from megatron_rl.distributed import agreement
from megatron_rl.distributed.agreement import Job
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


def test_ranks_that_meet_go_on_each_time(printed: list[str]) -> None:
    ranks = jobs(3)
    for _ in range(3):
        assert on_threads(*(lambda job=job: job.wait_for_all(30) for job in ranks)) == [None] * 3
    assert ranks[0].round == 3 and not printed


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_message_of_every_rank_is_printed_once_by_rank_0_before_any_leaves(first: int, printed: list[str]) -> None:
    ranks = jobs(3)
    ahead = threading.Thread(target=ranks[first].print_once, args=("lr=nan",))
    ahead.start()
    if first != 0:
        ahead.join(timeout=0.05)
        assert ahead.is_alive() and not printed
    on_threads(*(lambda job=job: job.print_once("lr=nan") for job in ranks if job.rank != first))
    ahead.join(timeout=30)
    assert printed == ["lr=nan"] and not ahead.is_alive()


def test_rank_0_prints_what_another_rank_met(printed: list[str]) -> None:
    ranks = jobs(3)

    def start(job: Job) -> None:
        try:
            job.wait_for_all(30)
        except ConfigError as error:
            job.print_once(str(error))
            raise

    outcomes = on_threads(
        lambda: start(ranks[0]), lambda: start(ranks[1]), lambda: ranks[2].print_once("a.jsonl is missing")
    )
    assert [type(outcome) for outcome in outcomes] == [ConfigError, ConfigError, type(None)]
    assert on_threads(*(lambda job=job: job.wait_for_all(30) for job in ranks)) == [None] * 3  # another run may start
    assert len(printed) == 1 and printed[0].startswith("rank 2 on ") and printed[0].endswith(": a.jsonl is missing")


def test_where_rank_0_is_elsewhere_one_of_the_others_prints(printed: list[str]) -> None:
    ranks = jobs(4, grace_s=0.2)
    on_threads(*(lambda job=job: job.print_once("no room") for job in ranks[1:]))
    assert len(printed) == 1 and printed[0].endswith(": no room") and printed[0].startswith("rank ")


def test_a_rank_that_never_comes_is_a_named_end() -> None:
    with pytest.raises(PeerError, match=r"rank 0 waited 0\.1 s \(run.deadline_s\) for all 2 ranks"):
        jobs(2)[0].wait_for_all(0.1)


def test_a_process_alone_prints_at_once_and_a_long_message_is_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    agreement.announce("x" * 10_000)
    said = capsys.readouterr().err
    assert said.startswith("megatron_rl: xxx") and said.endswith("x… (10000 characters)\n") and len(said) < 4100
    report = json.loads((tmp_path / "error.json").read_text())
    assert report["message"]["message"] in said and int(report["message"]["extraInfo"]["timestamp"]) > 0


def one_rank_lacks_its_data(rank: int, world: int, given: list[str], lacking: int) -> tuple[int, str]:
    missing = [part.replace("train.jsonl", "gone.jsonl") for part in given]
    return command_line(rank, world, missing if rank == lacking else given)


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_file_that_one_host_lacks_ends_all_ranks_with_one_message(pool, arithmetic, tmp_path, lacking) -> None:
    given = arguments(arithmetic, tmp_path)
    results = pool.run(2, one_rank_lacks_its_data, given, lacking, timeout_s=60)
    assert [code for code, _ in results] == [2, 2], results
    assert results[1][1] == "" and results[0][1].count("gone.jsonl") == 1, results
    assert ("rank 1 on " in results[0][1]) == (lacking == 1)


def _without_reference(config):
    """Build a backend whose reference policy, the last of its parts, cannot be made."""
    from megatron_rl.backend import MegatronBackend, backend

    def fails(model):
        raise RuntimeError("no reference")

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(backend.PLACEMENTS, config.reference.placement, fails)
        return MegatronBackend(config)


def builds_again(rank: int, world: int, folder: str, has_world: bool, part: str) -> tuple[str, bool, int, int]:
    """Return a failed construction's error, whether a world stayed, its groups, and a second construction's stages.

    part: ``weights``, which the model lacks, or ``reference``, which cannot be made.
    """
    from megatron_rl.backend import MegatronBackend
    from megatron_rl.config import load_config

    if not has_world:
        dist.destroy_process_group()
    config = load_config(None, [f"model.hf_path={folder}/model", "run.deadline_s=60"])
    broken = {"weights": lambda: MegatronBackend(config, weights={}), "reference": lambda: _without_reference(config)}
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
    [(True, "weights", "embed_tokens"), (False, "weights", "embed_tokens"), (True, "reference", "no reference")],
)
def test_a_backend_that_failed_leaves_no_groups_and_another_is_built(pool, arithmetic, has_world, part, named) -> None:
    ((said, stays, groups, stages),) = pool.run(1, builds_again, str(arithmetic), has_world, part, timeout_s=60)
    assert named in said and (stays, groups, stages) == (has_world, int(has_world), 1)


@pytest.mark.long(seconds=20)
@pytest.mark.distributed
def test_under_torchrun_the_message_is_seen_once_above_its_report_and_in_it() -> None:
    command = [sys.executable, "-m", *TORCHRUN, "2"]
    environment = worker_environment()
    done = subprocess.run(
        [*command, "-m", "megatron_rl.train", "train.steps=3"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=patient(120.0),
        check=False,
    )
    said = done.stderr
    assert done.returncode == 1 and "exitcode  : 2" in said, said  # torchrun's own code is always 1
    assert said.count("megatron_rl: config key train.steps (value 3) is called train.num_rollouts now") == 1, said
    assert "traceback : config key train.steps (value 3) is called" in said.partition("Root Cause")[2], said
