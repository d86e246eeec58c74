"""distributed/watchdog*.py: bytes of strangers, slow stages, and a user's function that does not return."""

import contextlib
import json
import os
import re
import resource
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest

from megatron_rl.distributed import rank_state
from megatron_rl.distributed import time_limit as time_limit_module
from megatron_rl.distributed import watchdog as watch_module
from megatron_rl.distributed import watchdog_server as server_module
from megatron_rl.distributed.rank_state import LOOKS, LongWait, RankState, SlowStages, where_is
from megatron_rl.distributed.watchdog import Watchdog
from megatron_rl.distributed.watchdog_server import STRANGERS, JsonConnection, WatchdogServer, own_address
from megatron_rl.errors import PeerError
from tests.patience import HANG_S, patient, until
from tests.workers.pool import Pool

TOKEN = "5" * 32
NEVER = SlowStages(0.0, print)


class Watch:
    """A server for two ranks, and the way to join it."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address = self.listener.getsockname()
        self.server = WatchdogServer(self.listener, TOKEN, 2, NEVER)

    def connection(self) -> socket.socket:
        connection = socket.create_connection(self.address)
        connection.settimeout(patient(HANG_S))
        return connection

    def join(self, deadlines_s: tuple[float, float], sockets: list[socket.socket] | None = None) -> list[Watchdog]:
        """Let both ranks join, and return them once both were welcomed."""
        sockets = sockets or [self.connection(), self.connection()]
        ranks = [Watchdog(rank, f"rank {rank}", "rank 0", deadlines_s[rank]) for rank in (0, 1)]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda rank, line: rank.join(JsonConnection(line), TOKEN), ranks, sockets))
        return ranks


@pytest.fixture
def watch() -> Iterator[Watch]:
    watch = Watch()
    yield watch
    watch.server.close(failed=False)
    assert not watch.server._thread.is_alive()


def hello(**changed: object) -> bytes:
    return json.dumps({"is": "hello", "rank": 0, "who": "rank 0", "token": TOKEN} | changed).encode() + b"\n"


BYTES = {
    "no JSON": b"GET / HTTP/1.1\r\n\r\n",
    "no UTF-8": b"\xff\xfe\x00\n",
    "a token of other letters": hello(token="käse" * 8),
    "half a surrogate pair": hello(token="\ud800"),
    "a token that is no text": hello(token=[TOKEN]),
    "another token": hello(token="6" * 32),
    "no rank": hello(rank=None),
    "a rank beyond the world": hello(rank=2),
    "a rank below 0": hello(rank=-1),
    "a rank that is infinite": b'{"is": "hello", "rank": 1e999, "who": "", "token": "%s"}\n' % TOKEN.encode(),
    "true for a rank": hello(rank=True),
    "who is no text": hello(who=5),
    "no hello": b'{"is": "raised", "error": "planted"}\n',
    "a list": b"[1]\n",
    "nothing that says what it is": b"{}\n",
    "deep JSON": b"[" * 4000 + b"\n",
    "deep and longer": b"[" * 100_000 + b"\n",
    "a long number": b"1" * 4090 + b"\n",
    "no newline": b'"' * 1_000_000,
}


@pytest.mark.parametrize("name", BYTES)
def test_a_strangers_bytes_close_its_connection_and_nothing_else(watch, name) -> None:
    with watch.connection() as stranger:
        try:
            stranger.sendall(BYTES[name])
            assert stranger.recv(1) == b""
        except ConnectionError:  # closed while it was sending
            pass
    assert len(watch.join((HANG_S, HANG_S))) == 2 and watch.server.cause is None


def test_a_second_connection_of_a_rank_is_refused(watch) -> None:
    lines = [watch.connection(), watch.connection()]
    with watch.connection() as second:
        lines[0].sendall(hello())
        assert until(lambda: 0 in watch.server.peers)
        second.sendall(hello())
        assert second.recv(1) == b""
    lines[1].sendall(hello(rank=1, who="rank 1"))
    assert lines[0].recv(100) == b'{"is": "welcome"}\n' == lines[1].recv(100)
    [line.close() for line in lines]


def test_silent_connections_are_closed_or_bounded_and_the_port_closes_behind_the_last_rank(watch, monkeypatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(server_module, "HELLO_S", 0.1)
        with watch.connection() as stranger:
            assert stranger.recv(1) == b""
    strangers = [watch.connection() for _ in range(150)]
    assert until(lambda: len(watch.server._strangers) == 2 + STRANGERS)
    assert sum(stranger.fileno() != -1 for stranger in strangers) == 150
    watch.join((HANG_S, HANG_S))
    assert until(lambda: not watch.server._strangers)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(watch.address)
    assert all(stranger.recv(1) == b"" for stranger in strangers)
    [stranger.close() for stranger in strangers]


def test_the_watch_outlives_a_time_without_descriptors(watch) -> None:
    sockets, limits = [socket.socket(), socket.socket()], resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(int(name) for name in os.listdir("/proc/self/fd"))
    spare = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (most + 1, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                spare.append(os.open("/dev/null", os.O_RDONLY))
        sockets[0].connect(watch.address)
        assert until(lambda: watch.server._accept_at)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        [os.close(descriptor) for descriptor in spare]
    sockets[1].connect(watch.address)
    assert len(watch.join((HANG_S, HANG_S), sockets)) == 2


def test_the_watch_listens_at_the_ranks_interface(monkeypatch) -> None:
    for name, value in (("GLOO_SOCKET_IFNAME", "lo"), ("NCCL_SOCKET_IFNAME", "^docker,=lo")):
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            assert own_address() == "127.0.0.1"
    entries = [entry for entries in psutil.net_if_addrs().values() for entry in entries]
    addresses = [entry.address for entry in entries if entry.family == socket.AF_INET]
    for address in (address for address in addresses if not address.startswith("127.")):
        monkeypatch.setenv("MASTER_ADDR", address)
        assert own_address() == address
    with server_module.listen(own_address(), 1) as listener:
        assert listener.getsockname()[0] not in ("0.0.0.0", "::")


def test_a_port_that_nobody_serves_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(PeerError, match=rf"rank 1 cannot reach the watch of rank 0 at 127\.0\.0\.1:{port}"):
        server_module.connect("127.0.0.1", port, "rank 1", 5.0)


# --- a function that does not return


@pytest.fixture
def ended(monkeypatch) -> Iterator[threading.Event]:
    """Set where a watch thread ends the process, which it does not; each has ended before ``os._exit`` is back."""
    ended = threading.Event()
    monkeypatch.setattr(watch_module.os, "_exit", lambda code: ended.set())
    monkeypatch.setattr(watch_module, "END_S", 0.2)
    yield ended
    for thread in [thread for thread in threading.enumerate() if thread.name == "watch"]:
        thread.join(patient(HANG_S))
        assert not thread.is_alive()


def reward_that_hangs(until_set: threading.Event) -> bool:
    return until_set.wait(patient(HANG_S))


def test_a_users_function_that_does_not_return_ends_a_world_of_one(ended, capfd) -> None:
    watch = Watchdog(0, "rank 0 (here)", "rank 0 (here)", 0.1)
    watch.start()
    with watch.own_code("reward"):
        assert reward_that_hangs(ended)
    said = capfd.readouterr().err
    assert re.search(r"rank 0 \(here\) has been in 'reward' for .* than run.deadline_s=0.1 s, at .*num_workers", said)
    assert "its main thread stood at" in said and "reward_that_hangs" in said


def test_a_call_within_a_stage_is_named_as_the_function_that_it_is(ended, capfd) -> None:
    """A loss is called for each micro-batch: its calls change no stage and tell no rank."""
    watch = Watchdog(0, "rank 0 (here)", "rank 0 (here)", patient(HANG_S))
    watch.start()
    with watch.stage("update"):
        before = watch._number, watch._since
        with watch.own_call("loss"):
            pass
        assert (watch._number, watch._since, watch._stage) == (*before, "update")
        with watch.own_call("environment"), contextlib.suppress(KeyError), watch.own_call("loss"):
            raise KeyError
        watch.deadline_s = 0.1
        with watch.own_call("loss"):
            assert reward_that_hangs(ended)
    assert "rank 0 (here) has been in 'loss' for " in capfd.readouterr().err


def waits_for_rank_0(rank: int, world: int) -> str | None:
    """Let rank 0 stay in its function until rank 1, which waits for it within its own, has looked at the time."""
    import torch
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    watch = Watchdog(rank, f"rank {rank}", "rank 0", 0.0)

    def look_once_it_waits() -> None:
        if until(lambda: where_is(watch._main, in_own_code=True)[1]):
            watch._look()
        store.set("looked", "")

    with watch.own_code("advantage"):
        if rank == 0:
            assert until(lambda: store.check(["looked"]))
        else:
            threading.Thread(target=look_once_it_waits).start()
        dist.broadcast(torch.zeros(1), src=0)
    watch.leave()
    return None if watch._cause is None else watch._cause.text


def test_a_rank_that_waits_in_its_function_is_not_to_blame_and_the_cause_is_known_before_nccl_ends(pool: Pool) -> None:
    assert pool.run(2, waits_for_rank_0, timeout_s=60) == [None, None]
    # the waiting rank asks once it has waited for run.deadline_s, and the rank that is busy elsewhere is named
    for text, rank in pool.run(2, stalls_under_nccl, timeout_s=60):
        assert rank == 1 and text.startswith("rank 1 keeps the others waiting: it has been in 'update'"), text
        assert "rank 0 met a wait of " in text


def test_a_users_own_line_waits_for_no_rank_though_it_looks_like_it() -> None:
    """A function that stands at a line with ``.item()`` may be the one that does not return."""
    held, number = threading.Lock(), np.float32(1.0)
    held.acquire()

    def loss() -> None:
        assert held.acquire() and number.item()

    thread = threading.Thread(target=loss)
    thread.start()
    assert until(lambda: where_is(thread.ident)[0].endswith(" loss"))
    assert where_is(thread.ident)[1] and not where_is(thread.ident, in_own_code=True)[1]
    held.release()
    thread.join()


def test_a_wait_is_long_once_every_look_of_that_time_found_it(monkeypatch) -> None:
    """It counts from the first look that finds it; one that finds the thread elsewhere begins anew.

    So does one after another gather: a rank that waits there for engines meets the others again and again.
    """
    locks, number = [threading.Lock() for _ in range(3)], np.float32(1.0)
    [lock.acquire() for lock in locks]

    def waits(lock: threading.Lock) -> None:
        assert lock.acquire() and number.item()

    def works(lock: threading.Lock) -> None:
        assert lock.acquire()

    thread = threading.Thread(target=lambda: (waits(locks[0]), works(locks[1]), waits(locks[2])))
    thread.start()
    long_wait = LongWait(thread.ident, 10.0)
    assert long_wait.look_s * LOOKS == 10.0
    assert until(lambda: where_is(thread.ident)[0].endswith(" waits"))
    assert [long_wait.look(now) for now in (0.0, 4.0, 9.9)] == [None] * 3
    assert long_wait.look(10.0).endswith(" waits")
    locks[0].release()
    assert until(lambda: where_is(thread.ident)[0].endswith(" works"))
    assert long_wait.look(11.0) is None
    locks[1].release()
    assert until(lambda: where_is(thread.ident)[0].endswith(" waits"))
    assert [long_wait.look(now) for now in (12.0, 21.9)] == [None] * 2
    assert long_wait.look(22.0).endswith(" waits")
    monkeypatch.setattr(rank_state, "num_gathers", lambda: 10**6)
    assert [long_wait.look(now) for now in (22.1, 32.0)] == [None] * 2 and long_wait.look(32.2).endswith(" waits")
    locks[2].release()
    thread.join()


def stalls_under_nccl(rank: int, world: int) -> tuple[str, int]:
    """Let rank 1 keep rank 0 in a collective that never fails by itself, as NCCL's do until they end the process."""
    import torch
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    server = None
    if rank == 0:
        listener = socket.create_server(("127.0.0.1", 0))
        server = WatchdogServer(listener, TOKEN, 2, NEVER)
        store.set("watch", f"{listener.getsockname()[1]}")
    watch = Watchdog(rank, f"rank {rank}", "rank 0", patient(2.0), times_waits=True)
    watch.join(server_module.connect("127.0.0.1", int(store.get("watch")), "rank 1", 5.0), TOKEN)
    with watch.stage("update"):
        if rank == 1:
            assert until(watch._known.is_set)
        dist.all_reduce(torch.zeros(1))
    assert until(watch._known.is_set)
    watch.leave()
    if server is not None:
        server.close(failed=False)
    return watch._cause.text, watch._cause.rank


def test_user_code_before_the_watch_has_a_limit_too(monkeypatch, capfd) -> None:
    ended = threading.Event()
    monkeypatch.setattr(time_limit_module.os, "_exit", lambda code: ended.set())
    with time_limit_module.time_limit("the import of reward.functions", None):
        pass
    assert not capfd.readouterr().err and not ended.is_set()
    with time_limit_module.time_limit("the import of reward.functions", 0.05):
        assert reward_that_hangs(ended)
    said = capfd.readouterr().err
    assert "rank 0 has been in the import of reward.functions for longer than run.deadline_s=0.05 s" in said
    assert "reward_that_hangs" in said


def test_a_users_function_that_does_not_return_is_named_on_every_rank(watch, ended) -> None:
    guilty, other = watch.join((patient(HANG_S), HANG_S))
    guilty.deadline_s = 0.1  # once all have joined, which may take a loaded host longer
    with guilty.own_code("reward"):
        assert other._known.wait(patient(HANG_S)) and reward_that_hangs(ended)
    assert other._cause.rank == 0 and other._cause.text == guilty._cause.text
    assert other._cause.text.startswith("rank 0 has been in 'reward' for ")


def test_one_that_returns_in_time_ends_nothing(ended) -> None:
    watch, looks = Watchdog(0, "rank 0", "rank 0", patient(HANG_S)), []
    look = watch._look
    watch._look = lambda: (look(), looks.append(1))
    watch.start()
    with pytest.raises(KeyError), watch.own_code("reward"):
        raise KeyError
    watch.deadline_s = 0.0  # that of nothing: no function is called
    assert until(lambda: len(looks) > 2) and watch._cause is None
    watch.leave()


# --- slow stages


def at(rank: int, stage: str, since: float, *, ended: bool = False) -> RankState:
    return RankState(rank=rank, who=f"rank {rank} (here)", stage=stage, since=since, ended=ended)


def test_slow_stages_are_said_once_and_again_at_twice_the_time() -> None:
    said: list[str] = []
    slow = SlowStages(60.0, said.append)
    ranks = [at(0, "rollout", 4.0), at(1, "reward", 0.0), at(2, "rollout", 5.0), at(3, "rollout", 5.0)]
    ranks.append(at(4, "eval", -500.0, ended=True))
    for now in (1.0, 59.9, 60.0, 61.0, 119.0, 121.0, 239.0):
        slow.look(ranks, now)
    assert said == [
        "in 'reward' for 60 s: rank 1 (here); in 'rollout' for 56 s: ranks 0, 2-3",
        "in 'reward' for 121 s: rank 1 (here); in 'rollout' for 117 s: ranks 0, 2-3",
    ]
    ranks = [at(0, "update", 240.0), at(1, "update", 240.0)]  # they have gone on, and begin anew
    for now in (250.0, 300.0, 301.0):
        slow.look(ranks, now)
    assert said[2:] == ["in 'update' for 60 s: ranks 0-1"]


def test_a_world_of_one_says_its_slow_stages_itself() -> None:
    said: list[str] = []
    watch = Watchdog(0, "rank 0 (here)", "rank 0 (here)", HANG_S, SlowStages(0.2, said.append))
    watch.start()
    with watch.stage("rollout"):
        assert until(lambda: any(re.fullmatch(r"in 'rollout' for \d+ s: rank 0 \(here\)", line) for line in said))
    watch.leave()
