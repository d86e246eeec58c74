"""Sender of the trainer's weights: every running engine gets them whole or not at all.

A sync is a start, one message per bucket, an end that states version, number and checksum of the tensors, a finish, a
fresh prefix cache, and a receipt from every worker, which is compared. A failure before that leaves the engine without
a version, and the caller sends everything again or stops. The exporting iterator is always run to its end, since other
ranks are in its collectives.

In flight, an engine pauses before the start and resumes after the receipt; the fresh prefix cache then takes the
running requests' keys and values too, which are computed again with the new weights. An engine whose update fails gives
up its running requests.

With ``delta`` an engine whose receipt is that of the latest sync gets the words that changed since then
(rollout/weight_sync/held.py), and every other engine everything: decided before the first bucket, for all of them.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from megatron_rl.errors import EngineError
from megatron_rl.rollout.engine import NO_WEIGHTS, SyncReport
from megatron_rl.rollout.vllm.replica import UPDATING, Replica, ReplicaLost, WeightReceipt
from megatron_rl.rollout.weight_sync.group import BroadcastGroup
from megatron_rl.rollout.weight_sync.half import Half, room_of
from megatron_rl.rollout.weight_sync.held import Compared, HeldBuckets
from megatron_rl.rollout.weight_sync.transport import Tally, is_adapter

log = logging.getLogger(__name__)
BACKEND = "megatron_rl"  # the receiver's name in vLLM's registry; see rollout/weight_sync/receiver.py


class WeightSender:
    """Sends one rank's weights to the replicas that it drives.

    channel: ``shared_memory`` (one host), ``broadcast`` (a process group with all engines: NCCL on GPUs, gloo on CPUs),
        or ``cuda_ipc`` (an engine on this rank's GPU opens the bucket's memory).
    bucket_bytes: memory of the two halves together; a tensor above a half enlarges it to its size. Shared memory is
        kept from one sync to the next, since fresh pages cost more than the copy; memory of a device is not.
    deadline_s: seconds for every single answer.
    adapter: rank and alpha of adapters that come apart from the weights, as their pairs; None: merged, or none.
    full_every: 0, or: only what changed is sent, but for the first of so many syncs; what was sent is held on the host.
    """

    def __init__(
        self,
        *,
        channel: str,
        bucket_bytes: int,
        deadline_s: float,
        device: torch.device,
        address: str = "127.0.0.1",
        adapter: Mapping[str, float] | None = None,
        full_every: int = 0,
    ) -> None:
        self.channel, self.bucket_bytes, self.deadline_s, self.device = channel, bucket_bytes, deadline_s, device
        self.group = BroadcastGroup(device, address, deadline_s, holds=bool(full_every))
        self.halves: list[Half | None] = [None, None]
        self.adapter = adapter
        self._joined: set[int] = set()
        self.held = HeldBuckets() if full_every else None
        self.held_version = NO_WEIGHTS  # whose weights are held whole
        self.receipts: dict[int, WeightReceipt] = {}  # of the latest sync that a replica took, by its id
        self._full_every, self._syncs = full_every, 0
        self._has_weights: set[int] = set()  # the replicas that lack no weight beside adapters, by id

    def lacks_weights(self, replica: Replica) -> bool:
        """Tell whether adapters alone would find no weights there: it is new, was restarted, or a sync failed."""
        return id(replica) not in self._has_weights

    def forget(self, replica: Replica) -> None:
        """Close the channel to a replica whose engine is another one now; `join` opens it again."""
        self._joined.discard(id(replica))
        self._has_weights.discard(id(replica))
        self.receipts.pop(id(replica), None)
        if self.group.holds(replica):
            self.group.close()

    def free_device(self) -> None:
        """Give the buckets' memory on the device back, and keep the shared memory."""
        for half in self.halves:
            if half is not None:
                half.free_device()

    def free(self) -> None:
        """Give the buckets' memory back; the next sync takes new memory."""
        for half in self.halves:
            if half is not None:
                half.close()
        self.halves[:] = [None, None]

    def deliver(
        self,
        tensors: Iterator[tuple[str, torch.Tensor]],
        version: int,
        replicas: Sequence[Replica],
        *,
        in_flight: bool = False,
    ) -> SyncReport:
        """Send every tensor to every replica; errors of ``tensors`` are raised, those of replicas are in the report.

        in_flight: whether requests may be under way on the replicas.
        """
        had = [x for x in replicas if not self.lacks_weights(x)]
        self._has_weights -= {id(x) for x in replicas}
        full = not self._full_every or self._syncs % self._full_every == 0
        self._syncs += bool(replicas)
        delivery = _Delivery(self, version, replicas, in_flight, full)
        report = delivery.run(tensors)
        kept = replicas if delivery.brought_weights else had
        self._has_weights |= {id(x) for x in kept if x.name not in report.failed}
        return report

    def join(self, replica: Replica) -> None:
        """Open a channel that each replica has for itself, once in its life."""
        if id(replica) not in self._joined:
            info = {"channel": self.channel, "deadline_s": self.deadline_s, "holds": self.held is not None}
            replica.control("init_weight_transfer", info, self.deadline_s)
            self._joined.add(id(replica))

    def rejoin(self, replica: Replica) -> None:
        """Open a replica's own channel anew, after another sender's; that of a broadcast breaks off by itself."""
        if self.channel != "broadcast":
            self._joined.discard(id(replica))
            self.join(replica)


class _Delivery:
    """Runs one sync; each replica has a thread of its own, so its messages keep their order."""

    def __init__(
        self, sync: WeightSender, version: int, replicas: Sequence[Replica], in_flight: bool, full: bool
    ) -> None:
        self.sync, self.version, self.replicas, self.in_flight = sync, version, replicas, in_flight
        self.threads = {id(x): ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-sync") for x in replicas}
        self.living = list(replicas)
        self.failed: dict[str, str] = {}
        self.lost: list[str] = []
        self.given_up: list[Future] = []
        self.tally = Tally()
        self.num_bytes = self.num_words = self.num_changed = 0
        self.sent_bytes: Counter[int] = Counter()  # by a replica's id
        self.brought_weights = False  # and not adapters alone
        self.halves = sync.halves
        self.full = full
        self.base = sync.held_version
        self.current: set[int] = set()  # replicas, by their ids, that hold what the sender holds, and get what changed
        self.broken = ""  # why the group of a broadcast is gone, and with it this sync for all of its engines
        # a bucket's broadcast has one deadline, and its answer another
        self.bucket_s = sync.deadline_s * (2 if sync.channel == "broadcast" else 1)

    def run(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> SyncReport:
        started, came_through = time.perf_counter(), False
        for replica in self.replicas:
            replica.weight_version = UPDATING if self.in_flight else NO_WEIGHTS
        try:
            self._meet()
            self._everywhere(self._begin)
            self._drop_rest()
            self._hold_begin()
            self._send(tensors)
            self._hold_end()
            self._everywhere(self._end)
            came_through = not self.failed
        finally:
            for replica in self.replicas:
                if replica.weight_version == UPDATING:  # ``tensors`` raised
                    self._give_up(replica, "the weight update in flight broke off")
            for future in self.given_up:
                future.result()
            for threads in self.threads.values():
                threads.shutdown(wait=True, cancel_futures=True)
            if not came_through or self.sync.channel != "shared_memory":
                self.sync.free()
            elif self.sync.device.type != "cpu":
                self.sync.free_device()
        return SyncReport(
            version=self.version,
            num_tensors=self.tally.count,
            num_bytes=self.num_bytes,
            seconds=time.perf_counter() - started,
            failed=self.failed,
            lost=tuple(self.lost),
            sent_bytes=max(self.sent_bytes.values(), default=0),
            changed_share=self.num_changed / self.num_words if self.num_words else None,
        )

    def _submit(self, replica: Replica, call: Callable, *arguments) -> Future:
        return self.threads[id(replica)].submit(call, *arguments)

    def _everywhere(self, step: Callable[[Replica], None]) -> None:
        for replica, future in [(x, self._submit(x, step, x)) for x in self.living]:
            self._settle(replica, future)

    def _settle(self, replica: Replica, future: Future) -> None:
        try:
            future.result()
        # ReplicaLost, RequestRefused, EngineError, and the errors of sockets and process groups
        except (RuntimeError, OSError) as error:
            self._drop(replica, error)

    def _drop(self, replica: Replica, error: Exception) -> None:
        self.failed.setdefault(replica.name, f"{error}")
        if isinstance(error, ReplicaLost):
            self.lost.append(replica.name)
        replica.weight_version = NO_WEIGHTS
        if self.in_flight and any(x is replica for x in self.living):
            self._give_up(replica, f"a weight update in flight failed: {error}")
        self.living = [x for x in self.living if x is not replica]
        if self.sync.group.holds(replica):
            self.broken = self.broken or f"{replica.name}: {error}"
        self.sync.forget(replica)

    def _drop_rest(self) -> None:
        """Drop all engines of a broadcast where one was dropped: what the others wait for in the group never comes."""
        for replica in self.living if self.broken else ():
            self._drop(replica, EngineError(f"this sync's broadcast broke off; {self.broken}"))

    def _give_up(self, replica: Replica, cause: str) -> None:
        """Make a replica give up its requests, in its own thread, after the messages on their way to it."""
        replica.weight_version = NO_WEIGHTS
        self.given_up.append(self._submit(replica, replica.give_up, cause))

    def _meet(self) -> None:
        """Open the channel to every replica; one that is gone is dropped before the others meet in a group."""
        if self.sync.channel != "broadcast":
            self._everywhere(self.sync.join)
            return
        if self.sync.group.spans(self.living):
            return
        counts: dict[int, int] = {}

        def count(replica: Replica) -> None:
            counts[id(replica)] = len(replica.control("weights_received", {}, self.sync.deadline_s))

        self._everywhere(count)
        if not self.living:
            return
        answers: list[tuple[Replica, Future]] = []

        def invite(replica: Replica, info: dict[str, object]) -> None:
            call = self._submit(replica, replica.control, "init_weight_transfer", info, self.bucket_s)
            answers.append((replica, call))

        try:
            self.sync.group.open([(x, counts[id(x)]) for x in self.living], invite)
        except (RuntimeError, OSError) as error:
            self.broken = f"{error}"
        for replica, future in answers:
            self._settle(replica, future)
        self._drop_rest()

    def _begin(self, replica: Replica) -> None:
        call, deadline_s = replica.control, self.sync.deadline_s
        if self.in_flight:
            call("pause", {}, deadline_s)
        if (receipt := self.sync.receipts.pop(id(replica), None)) is not None:
            found = [WeightReceipt(**x) for x in call("weights_received", {}, deadline_s)]
            if any(x != receipt for x in found):
                log.warning("%s says %s in place of %s, and gets all weights", replica.name, found, receipt)
                self.sync.rejoin(replica)
            elif not self.full and receipt.version == self.base:
                self.current.add(id(replica))
        call("abandon_weight_update", {}, deadline_s)
        call("start_weight_update", {}, deadline_s)

    def _hold_begin(self) -> None:
        if self.sync.held is not None and self.living:
            self.sync.held_version = NO_WEIGHTS  # until all of this version is held
            self.sync.held.begin()
            if self.sync.channel == "broadcast" and not self.current.issuperset(id(x) for x in self.living):
                self.current.clear()  # a broadcast is the same for all

    def _hold_end(self) -> None:
        if self.sync.held is not None and self.living:
            self.sync.held.end()
            self.sync.held_version = self.version

    def _send(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        turn, limit = 0, self.sync.bucket_bytes // 2
        for name, tensor in tensors:
            self.num_bytes += tensor.numel() * tensor.element_size()
            self.brought_weights |= not is_adapter(name)
            if not self.living:
                continue  # the other ranks still gather
            half = self.halves[turn]
            # not by the half's memory, which a large tensor enlarges: a sync's buckets are those of the sync before
            if half is not None and half.used and half.used + room_of(tensor) > limit:
                self._flush(half)
                turn = 1 - turn
            try:
                half = self._with_room(turn, tensor)
            except OSError as error:  # no shared memory; not raised, since the other ranks still gather
                for replica in self.living:
                    self._drop(replica, error)
                continue
            half.add(name, tensor)
        if self.halves[turn] is not None and self.halves[turn].used:
            self._flush(self.halves[turn])
        for half in self.halves:
            self._await(half)

    def _with_room(self, turn: int, tensor: torch.Tensor) -> Half:
        half = self.halves[turn]
        if half is not None and half.under_way:
            self._await(half)
        if half is None or not half.fits(tensor):
            if half is not None:
                half.close()
            size = max(self.sync.bucket_bytes // 2, room_of(tensor))
            half = self.halves[turn] = Half(size, self.sync.channel, self.sync.device)
        return half

    def _flush(self, half: Half) -> None:
        """Send a half's message to every replica; the half is under way until ``_await``."""
        call = "update_weights"
        compared = self._compare(half)
        changes = self.current if compared is not None and compared.difference is not None else set()
        message = half.message(whole=not changes.issuperset(id(x) for x in self.living))
        self.tally.add(message["checksum"], len(half.tensors))
        change: dict[str, object] = {}
        if changes:
            try:
                change = half.change_message(message, compared.difference, compared.payload)
            except OSError as error:  # no shared memory
                for replica in [x for x in self.living if id(x) in changes]:
                    self._drop(replica, error)
        living, messages = self.living, {id(x): change if id(x) in changes else message for x in self.living}
        self.sent_bytes.update({key: len(compared.payload) if key in changes else half.used for key in messages})
        half.under_way = [(x, self._submit(x, x.control, call, messages[id(x)], self.bucket_s)) for x in living]
        if self.sync.channel != "broadcast" or not living:
            return
        try:
            packed = half.changes if changes else half.bytes[: half.used]
            if len(packed):
                self.sync.group.broadcast(packed)
        except RuntimeError as error:
            self.broken = f"{error}"
        if self.broken:
            self.sync.group.close()  # here, since the error above holds the group as long as it lives
            self._await(half)

    def _compare(self, half: Half) -> Compared | None:
        """Hold a half's bytes for the next sync, and return how they differ from the last one's where somebody asks."""
        held, packed = self.sync.held, half.bytes[: half.used]
        if held is None:
            return None
        if not self.current:
            held.keep(half.tensors, packed)
            return None
        compared = held.compare(half.tensors, packed)
        if compared is not None:
            self.num_words += compared.num_words
            self.num_changed += compared.num_changed
        return compared

    def _await(self, half: Half | None) -> None:
        """Wait for every replica's answer to a half, whose memory is free again then."""
        if half is not None and half.under_way:
            for replica, future in half.under_way:
                self._settle(replica, future)
            half.under_way = []
            half.clear()
        self._drop_rest()

    def _end(self, replica: Replica) -> None:
        call, deadline_s = replica.control, self.sync.deadline_s
        wanted = WeightReceipt(version=self.version, checksum=self.tally.value(), num_tensors=self.tally.count)
        end = {"kind": "end", "version": self.version, "checksum": wanted.checksum, "num_tensors": wanted.num_tensors}
        if self.sync.adapter:
            end["adapter"] = dict(self.sync.adapter)
        call("update_weights", end, deadline_s)
        for worker, receipt in enumerate(call("weights_received", {}, deadline_s)):
            if failure := WeightReceipt(**receipt).failure:
                raise EngineError(f"worker {worker} of {replica.name}: {failure}")
        call("finish_weight_update", {"weight_version": str(self.version)}, deadline_s)
        if self.sync.adapter:
            call("use_adapter", {}, deadline_s)
        call("reset_prefix_cache", {"running": True} if self.in_flight else {}, deadline_s)
        for worker, receipt in enumerate(call("weights_received", {}, deadline_s)):
            if WeightReceipt(**receipt) != wanted:
                raise EngineError(
                    f"worker {worker} of {replica.name} says that it holds {receipt} after a sync of {wanted}"
                )
        if self.in_flight:
            call("resume", {}, deadline_s)
        replica.weight_version = self.version
        if self.sync.held is not None:
            self.sync.receipts[id(replica)] = wanted
