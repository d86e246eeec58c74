"""A rank that raises, is killed, stalls or plans on its own ends the run on every rank.

The message names rank and stage. Each rank is a process of its own, so that it may be killed, and must come to its end
at interpreter exit too.
"""

import re
import signal
import socket
import threading
import time
from dataclasses import dataclass, fields

import pytest

from megatron_rl.distributed import watchdog as watch_module
from megatron_rl.distributed.rank_state import RankState
from megatron_rl.distributed.topology import Topology
from megatron_rl.distributed.watchdog import Watchdog, open_watchdog
from megatron_rl.distributed.watchdog_server import JsonConnection, find_culprit
from megatron_rl.errors import PeerError
from tests.patience import HANG_S, patient, until
from tests.runs.command import arguments
from tests.workers.pool import Pool

BOUND_S = patient(600.0)  # to the end of every process, its start included
NEVER_S = 10 * BOUND_S  # a deadline that nothing here meets
MET_S = patient(20.0)  # one that a rank meets whose peer sleeps; to start, beside one another, takes them less


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of rank ``guilty`` of ``world`` (faulty_rank.py); every rank must say a line of the pattern ``says``."""

    name: str
    guilty: int
    pipeline: int
    says: str
    deadline_s: float = NEVER_S
    world: int = 2


RAISED = "raised .*it had been in 'update'"
GONE = r"is gone: its process ended without reporting an error \(killed\?\); its last reported stage is 'update'"
STALLS = "keeps the others waiting: it has been in"
RANK = "tests.faults.faulty_rank"
SLEPT = dict(guilty=1, pipeline=1, deadline_s=MET_S)
PIPED, ALONE = SLEPT | {"pipeline": 2}, SLEPT | {"guilty": 0, "world": 1}
FAULTS = {
    "raises, DP=2": Fault(name="raise", guilty=0, pipeline=1, says=RAISED),
    "raises and lives on, PP=2": Fault(name="raise_and_stay", guilty=1, pipeline=2, says=RAISED),
    "killed, DP=2": Fault(name="kill", guilty=1, pipeline=1, says=GONE),
    "killed, PP=2, the server": Fault(name="kill", guilty=0, pipeline=2, says=GONE),
    "sleeps in forward, PP=2": Fault(name="sleep", **PIPED, says=f"{STALLS} 'update'.*faulty_rank.py:.* broken"),
    # its own watch thread's words, or those of a rank whose collective timed out before that looked
    "sleeps in its reward, DP=2": Fault(
        name="reward", **SLEPT | {"guilty": 0},
        says=r"(keeps the others waiting: it )?has been in 'reward'.*faulty_rank.py:.* sleeping_reward",
    ),
    "sleeps in its loss, DP=2": Fault(
        name="loss", **SLEPT,
        says=r"(keeps the others waiting: it )?has been in .*'loss'|has been in 'update' .* sleeping_loss, in 'loss'",
    ),
    "sleeps in its loss, alone": Fault(name="loss", **ALONE, says=r"has been in 'loss' .* sleeping_loss"),
    "another plan, DP=2": Fault(name="plan", guilty=1, pipeline=1, says="plan: {who} has .*, the others"),
}


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_ends_every_rank_and_is_named(nursery, arithmetic, tmp_path, case):
    fault = FAULTS[case]
    own = {"reward": [f"reward.functions=[{RANK}:sleeping_reward]"], "loss": [f"loss.policy={RANK}:sleeping_loss"]}
    extra = [f"parallel.pipeline={fault.pipeline}", f"run.deadline_s={fault.deadline_s}", *own.get(fault.name, [])]
    given, main = arguments(arithmetic, tmp_path / "run", *extra), f"{RANK}:main"
    with nursery.ranks(fault.world, given, tmp_path, main, [fault.name, fault.guilty]) as ranks:
        ranks.wait(BOUND_S, but={fault.guilty} if fault.name == "raise_and_stay" else set())
        results = [(fork.poll(), path.read_text()) for fork, path in zip(ranks.forks, ranks.printed, strict=True)]
    replica, stage = (0, fault.guilty) if fault.pipeline == 2 else (fault.guilty, 0)
    who = f"rank {fault.guilty} (data-parallel {replica}, pipeline stage {stage})"
    says = fault.says if "{who}" in fault.says else "{who} " + fault.says
    wanted = re.compile(says.replace("{who}", re.escape(who)))
    for rank, (code, printed) in enumerate(results):
        if rank == fault.guilty and fault.name == "kill":
            assert code == -signal.SIGKILL, printed
        elif rank == fault.guilty and fault.name == "raise_and_stay":
            assert code is None, printed
        else:
            assert code == 1 and wanted.search(printed), f"rank {rank} ended with {code} and printed:\n{printed}"
        if rank != fault.guilty:  # the first error is the named one
            assert "Traceback" not in printed and "Error" not in printed[: wanted.search(printed).start()], printed


@pytest.mark.parametrize("named", ["rank 0 (it keeps the job's store", "rank 1 (its process on this host has ended)"])
def test_a_rank_that_is_killed_before_the_watch_opens_is_named(nursery, arithmetic, tmp_path, named):
    """gloo's error once ended the other rank with a traceback that named nobody."""
    guilty = int(named[5])
    given = arguments(arithmetic, tmp_path / "run", f"run.deadline_s={NEVER_S}")
    with nursery.ranks(2, given, tmp_path, f"{RANK}:main", ["early", guilty]) as ranks:
        codes = ranks.wait(BOUND_S)
        printed = ranks.printed[1 - guilty].read_text()
    assert codes == [(-signal.SIGKILL if rank == guilty else 1) for rank in (0, 1)], printed
    assert f"megatron_rl: rank {1 - guilty} of 2 lost {named}" in printed and "Traceback" not in printed, printed


def peer(rank: int, *, number: int = 5, waits: bool = True, **given) -> RankState:
    answer = {"at": f"somewhere:{rank}", "waits": waits, "left": False}
    return RankState(rank=rank, who=f"rank {rank} (here)", stage="update", number=number, **{"answer": answer, **given})


LOST = peer(0, lost="timed out")


@pytest.mark.parametrize(("peers", "guilty", "words"), [
    ([LOST, peer(1, waits=False), peer(2)], 1, "keeps the others waiting: it has been in 'update'"),
    ([LOST, peer(1), peer(2, number=3)], 2, "is 2 stages behind"),
    ([LOST, peer(1, answer=None), peer(2, waits=False)], 1, "does not answer"),
    ([LOST, peer(1, waits=False), peer(2, waits=False)], 1, "so do ranks [2]"),
    ([LOST, peer(1, waits=False, ended=True), peer(2)], None, "no rank is known to be the cause"),
    ([LOST, peer(1, lost="timed out")], None, "rank 1 in 'update' for"),
])
def test_the_server_blames_who_is_not_waiting_then_who_is_behind(peers, guilty, words):
    cause = find_culprit({p.rank: p for p in peers})
    assert cause.rank == guilty and words in cause.text and "rank 0 (here) met timed out" in cause.text, cause


def place(rank: int, world: int, *, pipeline: int = 1) -> Topology:
    """Return a Topology of data and pipeline parallelism, with no groups behind it."""
    data, names = world // pipeline, [field.name for field in fields(Topology)]
    alone = {name: None if name.endswith("_group") else int(name.endswith("_size")) for name in names}
    ranks = dict(rank=rank, world_size=world, data_size=data, data_rank=rank % data)
    return Topology(**alone | ranks | dict(pipeline_size=pipeline, pipeline_rank=rank // data))


def one_raises(rank: int, world: int) -> str:
    try:
        with open_watchdog(place(rank, world, pipeline=world), patient(HANG_S)) as watch, watch.stage("rollout"):
            if rank == 1:
                with watch.stage("reward"):
                    raise KeyError("planted")
            watch._known.wait(patient(HANG_S))
            raise PeerError("what raise_together says")
    except PeerError as error:
        return f"{error}, from {error.__cause__}"
    except KeyError as error:
        return error.__notes__[0]


def test_an_error_is_told_to_every_rank_with_its_stage(pool: Pool) -> None:
    first, guilty, last = pool.run(3, one_raises, timeout_s=30)
    assert guilty.startswith("rank 1 (data-parallel 0, pipeline stage 1) raised it; it had been in 'reward'")
    wanted = "rank 1 (data-parallel 0, pipeline stage 1) raised KeyError: 'planted'; it had been in 'reward'"
    for said in (first, last):
        assert said.startswith(wanted) and said.endswith("from what raise_together says"), said


def all_end_well(rank: int, world: int) -> list[str]:
    for _ in range(3):
        with open_watchdog(place(rank, world), patient(HANG_S)) as watch:
            for name in ("rollout", "update"):
                with watch.stage(name):
                    time.sleep(0.05 * rank)

    def left() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("watch")]

    until(lambda: not left())
    return left()


def test_a_watch_that_saw_nothing_leaves_nothing_behind(pool: Pool) -> None:
    assert pool.run(3, all_end_well, timeout_s=30) == [[], [], []]


def test_a_rank_that_cannot_end_is_ended_though_the_server_left_with_the_cause(monkeypatch):
    """Both lines come in one packet, and the main thread never comes back: once the stalled rank lived on."""
    ended = threading.Event()
    monkeypatch.setattr(watch_module.os, "_exit", lambda code: ended.set())
    monkeypatch.setattr(watch_module, "END_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        servers = server.accept()[0]
    with servers:
        servers.sendall(b'{"is": "welcome"}\n{"is": "cause", "rank": 1, "text": "rank 1 stalls"}\n{"is": "bye"}\n')
        Watchdog(1, "rank 1", "rank 0", patient(HANG_S)).join(JsonConnection(ours), "token")
        assert ended.wait(patient(HANG_S))
