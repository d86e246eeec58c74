"""The sender of the trainer's weights: every running engine gets all of them, or has no weight version.

A sync sends each engine these messages: a start, one message per bucket (batch of packed tensors),
an end, a finish, and a reset of the prefix cache. The end holds the version, and the number and
checksum of the tensors. Last, every worker answers with a receipt of what it holds, which must
equal the end. If any of this fails, the engine has no version, and the caller sends everything
again or stops. The iterator over the tensors is always consumed to its end, since each step may be
a collective in which other ranks wait.

If requests are under way (``in_flight``), an engine pauses before the start and resumes after the
receipts. The reset then also drops the running requests' keys and values, which are computed again
with the new weights. If an engine's update fails, the engine gives up its running requests.

The encoder (rollout/weight_sync/encoder.py) decides which bytes of a bucket are sent to which
engine: the whole bucket, the changes since the latest sync, or adapters apart from the weights.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from megatron_rl.errors import EngineError
from megatron_rl.rollout.engines.engine import NO_WEIGHTS, SyncReport
from megatron_rl.rollout.engines.replica import UPDATING, Replica, ReplicaLost, WeightReceipt, check_drafters
from megatron_rl.rollout.weight_sync.double_buffer import BucketBuffer, room_of
from megatron_rl.rollout.weight_sync.encoder import BucketEncoder, WholeEncoder
from megatron_rl.rollout.weight_sync.group import BroadcastGroup
from megatron_rl.rollout.weight_sync.transport import Tally

BACKEND = "megatron_rl"  # the receiver's name in vLLM's registry; see rollout/weight_sync/receiver.py


class WeightSender:
    """Sends one rank's weights to the replicas that it drives.

    channel: ``shared_memory`` (one host), ``broadcast`` (a process group with all engines: NCCL on
        GPUs, gloo on CPUs), or ``cuda_ipc`` (an engine on this rank's GPU opens the bucket's
        memory).
    bucket_bytes: the size of two buffers together, of which one is filled while engines read the
        other. A tensor larger than a buffer enlarges the buffer. Shared memory is kept between
        syncs. Memory on a GPU is freed after each sync.
    deadline_s: seconds for each answer of a replica.
    encoder: decides which bytes of a bucket are sent to which engine; None: the whole bucket to
        each.
    """

    def __init__(
        self,
        *,
        channel: str,
        bucket_bytes: int,
        deadline_s: float,
        device: torch.device,
        address: str = "127.0.0.1",
        encoder: BucketEncoder | None = None,
    ) -> None:
        self.channel, self.bucket_bytes, self.deadline_s, self.device = channel, bucket_bytes, deadline_s, device
        self.encoder: BucketEncoder = WholeEncoder() if encoder is None else encoder
        self.group = BroadcastGroup(device, address, deadline_s, holds=self.encoder.holds)
        self.buffers: list[BucketBuffer | None] = [None, None]
        self._joined: set[int] = set()

    def lacks_weights(self, replica: Replica) -> bool:
        """Return whether the replica lacks the model's frozen weights, so that LoRA adapters alone do not suffice."""
        return self.encoder.lacks_weights(replica)

    def forget(self, replica: Replica) -> None:
        """Close the channel to a replica whose engine was replaced or has failed. ``join`` opens it again."""
        self._joined.discard(id(replica))
        self.encoder.forget(replica)
        if self.group.holds(replica):
            self.group.close()

    def free_device(self) -> None:
        """Free the buckets' memory on the device, and keep the shared memory."""
        for buffer in self.buffers:
            if buffer is not None:
                buffer.free_device()

    def free(self) -> None:
        """Free all memory of the buckets. The next sync allocates it again."""
        for buffer in self.buffers:
            if buffer is not None:
                buffer.close()
        self.buffers[:] = [None, None]

    def deliver(
        self,
        tensors: Iterator[tuple[str, torch.Tensor]],
        version: int,
        replicas: Sequence[Replica],
        *,
        in_flight: bool = False,
    ) -> SyncReport:
        """Send every tensor to every replica; return a report. Errors of replicas are in the report, not raised.

        tensors: (name, tensor) pairs. Errors of this iterator are raised.
        in_flight: whether requests may be under way on the replicas.
        """
        return _Delivery(self, version, replicas, in_flight).run(tensors)

    def join(self, replica: Replica) -> None:
        """Open the channel to one replica, unless it is open. Not for a broadcast, whose group serves all replicas."""
        if id(replica) not in self._joined:
            info = {"channel": self.channel, "deadline_s": self.deadline_s, "holds": self.encoder.holds}
            replica.control("init_weight_transfer", info, self.deadline_s)
            self._joined.add(id(replica))

    def rejoin(self, replica: Replica) -> None:
        """Open the channel to one replica again, after another sender has used the replica.

        Do nothing for a broadcast: when the other sender opened its channel, the replica left this
        sender's process group. So this sync fails, and the next one opens a new group.
        """
        if self.channel != "broadcast":
            self._joined.discard(id(replica))
            self.join(replica)


class _Delivery:
    """Runs one sync. Each replica has a thread that sends all of the replica's messages, in order."""

    def __init__(self, sync: WeightSender, version: int, replicas: Sequence[Replica], in_flight: bool) -> None:
        self.sync, self.version, self.replicas, self.in_flight = sync, version, replicas, in_flight
        self.threads = {id(x): ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-sync") for x in replicas}
        self.living = list(replicas)
        self.failed: dict[str, str] = {}
        self.lost: list[str] = []
        self.given_up: list[Future] = []
        self.tally = Tally()
        self.num_bytes = 0
        self.sent_bytes: Counter[int] = Counter()  # a replica's id → bytes that it was sent
        self.encoder, self.buffers = sync.encoder, sync.buffers
        self.end_fields: Mapping[str, object] = {}  # the encoder's fields of the end message
        self.broken = ""  # why the broadcast's group is gone, so that the sync fails for all of its engines
        # A bucket's broadcast and its answer have one deadline each.
        self.bucket_s = sync.deadline_s * (2 if sync.channel == "broadcast" else 1)

    def run(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> SyncReport:
        # Open channels, begin the update everywhere, send the buckets, and end the update.
        started, came_through = time.perf_counter(), False
        self.encoder.open(self.version, self.replicas)
        for replica in self.replicas:
            replica.weight_version = UPDATING if self.in_flight else NO_WEIGHTS
        try:
            self._meet()
            self._everywhere(self._begin)
            self._drop_rest()
            self.encoder.begin(self.living, alike=self.sync.channel == "broadcast")
            self._send(tensors)
            self.end_fields = self.encoder.end(self.living)
            self._everywhere(self._end)
            came_through = not self.failed
        finally:
            # Wait for all threads, and free memory.
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
            changed_share=self.encoder.changed_share,
        )

    def _submit(self, replica: Replica, call: Callable, *arguments) -> Future:
        return self.threads[id(replica)].submit(call, *arguments)

    def _everywhere(self, step: Callable[[Replica], None]) -> None:
        for replica, future in [(x, self._submit(x, step, x)) for x in self.living]:
            self._settle(replica, future)

    def _settle(self, replica: Replica, future: Future) -> None:
        try:
            future.result()
        # These are ReplicaLost, RequestRefused, EngineError, and errors of sockets and process groups.
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
        """Drop all engines from the sync if its broadcast group is broken, since the engines would wait in vain."""
        for replica in self.living if self.broken else ():
            self._drop(replica, EngineError(f"this sync's broadcast broke off; {self.broken}"))

    def _give_up(self, replica: Replica, cause: str) -> None:
        """Queue a call that makes a replica give up its requests, behind the messages already queued for it."""
        replica.weight_version = NO_WEIGHTS
        self.given_up.append(self._submit(replica, replica.give_up, cause))

    def _meet(self) -> None:
        """Open the channel to every replica. For a broadcast, first drop the replicas that do not answer."""
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
        if self.encoder.greet(replica, deadline_s):
            self.sync.rejoin(replica)
        call("abandon_weight_update", {}, deadline_s)
        call("start_weight_update", {}, deadline_s)

    def _send(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        turn, limit = 0, self.sync.bucket_bytes // 2
        for name, tensor in tensors:
            self.num_bytes += tensor.numel() * tensor.element_size()
            if not self.living:
                continue  # other ranks still take part in gathering the tensors
            buffer = self.buffers[turn]
            # The limit is not the buffer's size, which a large tensor enlarges. So every sync has the same buckets.
            if buffer is not None and buffer.used and buffer.used + room_of(tensor) > limit:
                self._flush(buffer)
                turn = 1 - turn
            try:
                buffer = self._with_room(turn, tensor)
            except OSError as error:  # too little shared memory; not raised, since other ranks still gather
                for replica in self.living:
                    self._drop(replica, error)
                continue
            buffer.add(name, tensor)
        if self.buffers[turn] is not None and self.buffers[turn].used:
            self._flush(self.buffers[turn])
        for buffer in self.buffers:
            self._await(buffer)

    def _with_room(self, turn: int, tensor: torch.Tensor) -> BucketBuffer:
        buffer = self.buffers[turn]
        if buffer is not None and buffer.under_way:
            self._await(buffer)
        if buffer is None or not buffer.fits(tensor):
            if buffer is not None:
                buffer.close()
            size = max(self.sync.bucket_bytes // 2, room_of(tensor))
            buffer = self.buffers[turn] = BucketBuffer(size, self.sync.channel, self.sync.device)
        return buffer

    def _flush(self, buffer: BucketBuffer) -> None:
        """Send a buffer's bucket to every replica. The buffer must not be changed until ``_await`` has returned."""
        bucket = self.encoder.encode(buffer, self.living)
        self.tally.add(bucket.checksum, len(buffer.tensors))
        for replica in [x for x in self.living if id(x) not in bucket.parts]:
            self._drop(replica, bucket.error)
        self.sent_bytes.update({id(x): len(bucket.parts[id(x)][1]) for x in self.living})
        for replica in self.living:
            message, _ = bucket.parts[id(replica)]
            answer = self._submit(replica, replica.control, "update_weights", message, self.bucket_s)
            buffer.under_way.append((replica, answer))
        if self.sync.channel != "broadcast" or not self.living:
            return
        try:
            _, packed = bucket.parts[id(self.living[0])]  # the same bytes for all
            if len(packed):
                self.sync.group.broadcast(packed)
        except RuntimeError as error:
            self.broken = f"{error}"
        if self.broken:
            self.sync.group.close()  # outside the except block, whose error keeps the group alive
            self._await(buffer)

    def _await(self, buffer: BucketBuffer | None) -> None:
        """Wait for every replica's answer to a bucket, and clear the buffer for the next bucket."""
        if buffer is not None and buffer.under_way:
            for replica, future in buffer.under_way:
                self._settle(replica, future)
            buffer.under_way = []
            buffer.clear()
        self._drop_rest()

    def _end(self, replica: Replica) -> None:
        call, deadline_s = replica.control, self.sync.deadline_s
        # Send the totals, and ask each worker for a failure before the update is finished.
        wanted = WeightReceipt(version=self.version, checksum=self.tally.value(), num_tensors=self.tally.count)
        end = {"kind": "end", "version": self.version, "checksum": wanted.checksum, "num_tensors": wanted.num_tensors}
        call("update_weights", {**end, **self.end_fields}, deadline_s)
        for worker, receipt in enumerate(call("weights_received", {}, deadline_s)):
            if failure := WeightReceipt(**receipt).failure:
                raise EngineError(f"worker {worker} of {replica.name}: {failure}")
        # Finish the update, reset the prefix cache, and compare the receipts.
        call("finish_weight_update", {"weight_version": str(self.version)}, deadline_s)
        for method in self.encoder.finishing:
            call(method, {}, deadline_s)
        call("reset_prefix_cache", {"running": True} if self.in_flight else {}, deadline_s)
        receipts = call("weights_received", {}, deadline_s)
        for worker, receipt in enumerate(receipts):
            if WeightReceipt(**receipt) != wanted:
                raise EngineError(
                    f"worker {worker} of {replica.name} says that it holds {receipt} after a sync of {wanted}"
                )
        check_drafters(replica.name, receipts)
        if self.in_flight:
            call("resume", {}, deadline_s)
        replica.weight_version = self.version
        self.encoder.took(replica, wanted)
