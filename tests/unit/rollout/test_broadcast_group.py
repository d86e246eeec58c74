"""Checks rollout/weight_sync/group.py: one broadcast per bucket reaches every server, and a lost one harms no other."""

import contextlib
import itertools
import json
import os
import pathlib
import select
import signal
from collections.abc import Iterator

import pytest
import torch

from megatron_rl.errors import EngineError
from megatron_rl.rollout.engines.engine import NO_WEIGHTS
from megatron_rl.rollout.engines.replica import ReplicaLost
from megatron_rl.rollout.weight_sync import group
from megatron_rl.rollout.weight_sync.changed_encoder import ChangedEncoder
from megatron_rl.rollout.weight_sync.sender import WeightSender
from tests.pairwise import quick
from tests.patience import HANG_S, patient
from tests.unit.rollout.receiving_engine import num_bytes_of, weights_of
from tests.workers.nursery import Nursery

SENDER = {"bucket_bytes": 2**12, "channel": "broadcast", "deadline_s": patient(4.0)}
TENSORS = weights_of([(3,), (5, 7), (300,), (0,), (130, 9), (511,), (64, 5), (1,), (7, 7, 7)])


class Worker:
    """A process that takes calls, one line each, and answers each by a line."""

    def __init__(self, nursery: Nursery, printed: pathlib.Path) -> None:
        (read, told), (taken, write) = os.pipe(), os.pipe()
        function, arguments = "tests.unit.rollout.receiving_engine:run_worker", [patient(10 * HANG_S)]
        self.process = nursery.start(function, arguments, printed=printed, stdin=taken, pipe=told)
        os.close(told)
        os.close(taken)
        self.calls, self.answers = open(write, "w"), open(read)  # noqa: SIM115

    def close(self) -> None:
        self.process.kill()
        self.answers.close()
        with contextlib.suppress(BrokenPipeError):
            self.calls.close()


class Server:
    """Stands for a server as far as WeightSender knows it: some workers, each a process that takes every call."""

    def __init__(self, name: str, workers: list[Worker]) -> None:
        self.name, self.weight_version, self.workers = name, NO_WEIGHTS, workers
        self.before_bucket, self.num_buckets = {}, 0

    def control(self, method: str, arguments: dict, timeout_s: float) -> object:
        if arguments.get("kind") == "bucket":
            self.num_buckets += 1
            self.before_bucket.pop(self.num_buckets, lambda: None)()
        for rank, worker in enumerate(self.workers):
            own = dict(arguments)
            if "first_rank" in own:
                own["first_rank"] += rank
            try:
                worker.calls.write(json.dumps({"method": method, "arguments": own}) + "\n")
                worker.calls.flush()
            except BrokenPipeError:
                raise ReplicaLost(f"{self.name} is gone") from None
        answers = [self._answer(worker, method, timeout_s) for worker in self.workers]
        return [receipt for answer in answers for receipt in answer] if method == "weights_received" else None

    def _answer(self, worker: Worker, method: str, timeout_s: float) -> object:
        if not select.select([worker.answers], [], [], timeout_s)[0]:
            raise ReplicaLost(f"{self.name} did not answer {method}")
        line = worker.answers.readline()
        if not line:
            raise ReplicaLost(f"{self.name} is gone")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{self.name}: {answer['error']}")
        return answer["value"]

    def signal(self, number: int) -> None:
        os.kill(self.workers[-1].process.pid, number)


@pytest.fixture
def servers(nursery: Nursery, tmp_path: pathlib.Path) -> Iterator[list[Server]]:
    with contextlib.ExitStack() as opened:

        def worker(name: str) -> Worker:
            return opened.enter_context(contextlib.closing(Worker(nursery, tmp_path / name)))

        counts = {"one": 1, "two": 2, "three": 1}
        yield [Server(name, [worker(f"{name}{k}") for k in range(count)]) for name, count in counts.items()]


@pytest.fixture
def broadcasts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the bytes of each broadcast that the sender starts."""
    found, real = [], group.broadcast

    def watched(process_group, packed: torch.Tensor) -> None:
        found.append(len(packed))
        real(process_group, packed)

    monkeypatch.setattr(group, "broadcast", watched)
    return found


def whole(sync: WeightSender, version: int, servers: list[Server]) -> None:
    """Run a sync that all servers come out of with the version, as their workers' receipts say."""
    report = sync.deliver(iter(TENSORS.items()), version, servers)
    assert report.failed == {} and [x.weight_version for x in servers] == [version] * len(servers)
    assert sync.group.spans(servers)


def test_each_bucket_is_broadcast_once_to_all_servers(sync, servers, broadcasts):
    whole(sync, 1, servers)
    first, num_buckets = sync.group._group, servers[0].num_buckets
    assert num_buckets > 3 and len(broadcasts) == num_buckets
    assert [x.num_buckets for x in servers] == [num_buckets] * 3
    whole(sync, 2, servers)
    assert sync.group._group is first and len(broadcasts) == 2 * num_buckets
    whole(sync, 3, servers[1:])  # the first has the version already: a group of those that have not
    whole(sync, 4, servers)
    assert len(broadcasts) == 4 * num_buckets


def test_a_broadcast_brings_what_changed_unless_one_server_needs_everything(servers, broadcasts, senders):
    """What servers hold outlives a group; every worker compares the digests of every whole bucket."""
    sync = senders(**SENDER, encoder=lambda: ChangedEncoder(100))
    tensors, version = {name: tensor.clone() for name, tensor in TENSORS.items()}, itertools.count(1)

    def sent(*targets: Server) -> int:
        broadcasts.clear()
        tensors["weight.4"][0] += 1
        report = sync.deliver(iter(tensors.items()), next(version), targets)
        assert not report.failed, report.failed
        assert report.sent_bytes == sum(broadcasts)
        return sum(broadcasts)

    everything = num_bytes_of(tensors)
    assert sent(*servers[:2]) >= everything
    assert sent(*servers[:2]) < everything / 20
    first = sync.group._group
    assert sent(servers[0]) < everything / 20 and sync.group._group is not first
    assert sent(*servers[:2]) >= everything  # the second missed a sync
    assert sent(*servers[:2]) < everything / 20
    assert sent(*servers) >= everything  # the third is new
    assert sent(*servers) < everything / 20


@pytest.mark.parametrize("number", quick([signal.SIGKILL, signal.SIGSTOP], signal.SIGKILL))
def test_a_server_lost_in_mid_sync_ends_it_in_bounded_time_and_the_rest_go_on(sync, servers, number):
    """The server's second worker is killed or stopped at its third bucket; the next sync goes to the others, whole."""
    whole(sync, 1, servers)
    victim, rest = servers[1], [servers[0], servers[2]]
    victim.before_bucket[servers[0].num_buckets + 3] = lambda: victim.signal(number)
    drawn = []

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in TENSORS.items():
            drawn.append(name)
            yield name, tensor

    report = sync.deliver(counted(), 2, servers)
    assert victim.name in report.failed and victim.name in report.lost
    assert set(report.failed) == {x.name for x in servers} and drawn == list(TENSORS)
    assert all(x.weight_version == NO_WEIGHTS for x in servers) and not sync.group.spans(servers)
    whole(sync, 2, rest)
    whole(sync, 3, rest)


def test_a_server_that_is_gone_before_the_group_opens_keeps_no_other_from_its_weights(sync, servers):
    servers[1].signal(signal.SIGKILL)
    report = sync.deliver(iter(TENSORS.items()), 1, servers)
    assert set(report.failed) == {"two"} == set(report.lost)
    assert [x.weight_version for x in servers] == [1, NO_WEIGHTS, 1] and sync.group.spans([servers[0], servers[2]])
    whole(sync, 2, [servers[0], servers[2]])


def test_an_engine_that_is_forgotten_leaves_a_group_to_be_made_anew(sync, servers):
    whole(sync, 1, servers)
    sync.forget(servers[2])
    assert not sync.group.holds(servers[0])
    whole(sync, 2, servers)
