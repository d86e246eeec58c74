"""The encoder of changed weights (``weight_sync.delta``): sends only the words that changed since the previous sync.

A word has 2 or 4 bytes, the size of a weight. An engine's receipt is what its workers report of
their weights: version, checksum and number of tensors. An engine gets only the changed words if it
still reports the receipt of the latest sync. Every other engine gets all weights. This choice is
made once per sync, before the first bucket (batch of tensors). The trainer keeps host copies of the
buckets (host_copies.py), and compares new buckets with them.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence

from megatron_rl.rollout.engines.engine import NO_WEIGHTS
from megatron_rl.rollout.engines.replica import Replica, WeightReceipt
from megatron_rl.rollout.weight_sync.double_buffer import BucketBuffer
from megatron_rl.rollout.weight_sync.encoder import EncodedBucket, Part, WholeEncoder
from megatron_rl.rollout.weight_sync.host_copies import Compared, HostCopies

log = logging.getLogger(__name__)
OF_THE_WHOLE = ("kind", "num_bytes", "digests", "checksum")  # fields of a whole bucket's message


class ChangedEncoder(WholeEncoder):
    """Sends only the words (2 or 4 bytes, the size of a weight) that changed since the latest sync.

    The first of every ``weight_sync.full_every`` syncs sends all words.
    """

    holds = True

    def __init__(self, full_every: int) -> None:
        self._full_every, self._syncs, self._full = full_every, 0, True
        self._copies, self._copied_version = HostCopies(), NO_WEIGHTS  # version of the copies; NO_WEIGHTS: incomplete
        self._version, self._base = NO_WEIGHTS, NO_WEIGHTS  # versions of the sync under way, and of its base
        self.receipts: dict[int, WeightReceipt] = {}  # a replica's id → the receipt of its latest sync
        self._current: set[int] = set()  # ids of the replicas that hold the copied version, and get only changes
        self._num_words = self._num_changed = 0

    @property
    def changed_share(self) -> float | None:
        return self._num_changed / self._num_words if self._num_words else None

    def open(self, version: int, replicas: Sequence[Replica]) -> None:
        self._full = self._syncs % self._full_every == 0
        self._syncs += bool(replicas)
        self._version, self._base = version, self._copied_version
        self._current = set()
        self._num_words = self._num_changed = 0

    def greet(self, replica: Replica, deadline_s: float) -> bool:
        """Ask a replica's workers which weights they hold; return whether these differ from the latest sync's.

        True means that another trainer has sent weights, so the replica's channel must be opened
        again. False if there was no earlier sync.

        deadline_s: seconds for the workers' report.
        """
        if (receipt := self.receipts.pop(id(replica), None)) is None:
            return False
        said = [WeightReceipt(**x) for x in replica.control("weights_received", {}, deadline_s)]
        if any(x != receipt for x in said):
            log.warning(
                "%s holds weights %s, not the expected %s; all weights are sent to it", replica.name, said, receipt
            )
            return True
        if not self._full and receipt.version == self._base:
            self._current.add(id(replica))
        return False

    def begin(self, living: Sequence[Replica], *, alike: bool) -> None:
        if not living:
            return
        self._copied_version = NO_WEIGHTS  # until all buckets of this version are copied
        self._copies.begin()
        if alike and not self._current.issuperset(id(x) for x in living):
            self._current.clear()

    def encode(self, buffer: BucketBuffer, living: Sequence[Replica]) -> EncodedBucket:
        compared = self._compare(buffer)
        # Replicas without the copied version, and all if the bucket has no difference, read the whole bucket.
        changes = self._current if compared is not None and compared.difference is not None else set()
        message = buffer.message(whole=not changes.issuperset(id(x) for x in living))
        parts: dict[int, Part] = {id(x): (message, buffer.packed) for x in living if id(x) not in changes}
        error = None
        if changes:
            try:
                where = buffer.share(compared.payload)
            except OSError as no_memory:
                error = no_memory
            else:
                own = {name: message[name] for name in OF_THE_WHOLE}
                change = {**own, "difference": dataclasses.asdict(compared.difference), **where}
                parts |= {id(x): (change, compared.payload) for x in living if id(x) in changes}
        return EncodedBucket(checksum=message["checksum"], parts=parts, error=error)

    def _compare(self, buffer: BucketBuffer) -> Compared | None:
        """Copy a bucket for the next sync; return the bucket's difference from its copy of the previous sync.

        None if no replica gets changes in this sync, or if that copy has other tensors.
        """
        if not self._current:
            self._copies.keep(buffer.tensors, buffer.packed)
            return None
        compared = self._copies.compare(buffer.tensors, buffer.packed)
        if compared is not None:
            self._num_words += compared.num_words
            self._num_changed += compared.num_changed
        return compared

    def end(self, living: Sequence[Replica]) -> Mapping[str, object]:
        if living:
            self._copies.end()
            self._copied_version = self._version
        return {}

    def took(self, replica: Replica, receipt: WeightReceipt) -> None:
        self.receipts[id(replica)] = receipt

    def forget(self, replica: Replica) -> None:
        self.receipts.pop(id(replica), None)
