"""The receiver of the trainer's weights in a vLLM worker: the backend ``megatron_rl`` of vLLM's weight-transfer API.

    vllm serve MODEL --worker-extension-cls megatron_rl.rollout.weight_sync.receiver.Receiver
        --weight-transfer-config '{"backend": "megatron_rl"}'

The backend needs vLLM 0.29 or newer (distributed/weight_transfer/base.py), and was run with 0.32.0.
It runs in the engine's process, so it imports neither Megatron-Core nor the trainer.

A sync has a start, one update per bucket (batch of packed tensors), an ``end`` with the number and
checksum of all tensors, and a finish. If the arrived tensors differ from the ``end``, the sync
fails. Then the engine has no weight version until a later sync succeeds.

If the engine has one worker, the worker raises an error at a failure. With several workers, vLLM
(0.32.0, multiproc_executor.py) reads answers only up to the first worker that raised. The next call
would read the remaining answers as its own. So with several workers none raises, and each reports
its failure in its receipt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import vllm
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload

from megatron_rl.rollout.weight_sync.decoder import BucketDecoder, WholeDecoder
from megatron_rl.rollout.weight_sync.engine_model import (
    count_values,
    drop_half_loaded,
    forget_packed_experts,
    keep_waiting,
    partial_layers,
    plain,
    process_tied,
)
from megatron_rl.rollout.weight_sync.frozen_drafter import FrozenDrafter, load_from_files
from megatron_rl.rollout.weight_sync.mapped import MappedSegments
from megatron_rl.rollout.weight_sync.transport import Tally, join_group, open_storage, receive, view_of
from megatron_rl.weights.bucket_digest import NUM_PARTS, checksum_of, part_digests, parts_of

BACKEND = "megatron_rl"


@dataclass
class ChannelInfo(WeightTransferInitInfo):
    """Describes the channel by which buckets (batches of weight tensors) arrive.

    channel: ``shared_memory`` (a file that both processes map), ``broadcast`` (a process group of
        the trainer and all engines) or ``cuda_ipc`` (the trainer's memory on the same GPU).
    holds: whether the engine keeps copies of buckets, so that later syncs may bring only changes.

    The other fields describe the process group of a broadcast.

    address, port: where the trainer listens.
    first_rank: the rank of this engine's first worker.
    world_size: the number of all engines' workers, plus 1 for the trainer.
    group_backend: ``nccl`` or ``gloo``.
    deadline_s: seconds for joining, and for each broadcast.
    """

    channel: str
    holds: bool = False
    address: str = ""
    port: int = 0
    first_rank: int = 1
    world_size: int = 1
    group_backend: str = "gloo"
    deadline_s: float = 300.0


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """Holds one message of a sync.

    kind: ``bucket`` (the listed tensors, packed one after the other) or ``end`` (the totals of the
        whole sync).
    tensors: [name, dtype, shape, first byte] of each tensor; [] if only changes are sent.
    num_bytes: the size of the whole bucket.
    digests: the digests of the bucket's NUM_PARTS ranges of bytes (weights/bucket_digest.py).
    checksum: in a ``bucket``, its checksum; in the ``end``, the checksum of all buckets
        (transport.Tally).
    segment: the path of the file of shared memory; "" for another channel.
    storage: the handles of the trainer's GPU memory (transport.share_storage); {} for another
        channel.
    difference: {} if the bucket is sent whole. Otherwise the fields of a ``Difference``, which tell
        how to read the changed words (weights/delta.py). Size, digests and checksum are still the
        whole bucket's.
    version: in the ``end``, the weight version.
    num_tensors: in the ``end``, the number of tensors of the sync.
    adapter: in the ``end``, rank and alpha of adapters that the sync brought apart from the
        weights; {} if there are none.
    """

    kind: str
    tensors: list = field(default_factory=list)
    num_bytes: int = 0
    digests: list = field(default_factory=list)
    checksum: str = ""
    segment: str = ""
    storage: dict = field(default_factory=dict)
    difference: dict = field(default_factory=dict)
    version: int = -1
    num_tensors: int = 0
    adapter: dict = field(default_factory=dict)


class ReceivingEngine(WeightTransferEngine[ChannelInfo, BucketInfo]):
    """Receives weights as a backend of vLLM's weight transfer, and loads them by vLLM's layerwise reload."""

    init_info_cls = ChannelInfo
    update_info_cls = BucketInfo

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self._has_channel = False
        self._group = None
        self._open = False
        self._broken = ""  # the error with which vLLM failed to load weights; only a new engine helps then
        self._failure = ""  # the error of the sync under way, or of the channel
        self._maps = MappedSegments(self.device)
        self._decoder: BucketDecoder = WholeDecoder()
        self._ended: BucketInfo | None = None
        self._tally = Tally()
        self._arrived: dict[str, int] = {}  # a weight's name in the trainer → its number of values
        self._loaded: set[str] = set()  # vLLM's names of filled parameters; several weights may fill one
        self._wanted: set[str] = set()  # vLLM's names of all parameters that must be filled
        self._wanted_values = 0  # number of values of these parameters, without a vocabulary's padding
        self._adapters = None  # the policy's adapters; None if the engine takes no adapters apart from the weights
        if self.vllm_config.lora_config is not None:
            from megatron_rl.rollout.weight_sync.adapter import PolicyAdapters

            self._adapters = PolicyAdapters()
        if self.vllm_config.speculative_config is not None and self.device.type == "cpu":
            from megatron_rl.rollout.vllm import cpu_verification

            cpu_verification.mend(vllm.__version__)
        self._has_weights = False  # whether all weights came from this trainer
        self.frozen_drafter: FrozenDrafter | None = None
        self.receipt = {"version": -1, "checksum": "", "num_tensors": 0}

    def init_transfer_engine(self, init_info: ChannelInfo) -> None:
        self._failure, self._has_channel = "", False
        self._attempt(self._open_channel, init_info)

    def _attempt(self, step: Callable[..., None], *arguments: object) -> None:
        """Call ``step(*arguments)``, unless an earlier step of the sync has failed.

        If the engine has one worker, the step's error is raised. With several workers it is noted
        in ``_failure``.
        """
        if self._failure:
            return
        try:
            step(*arguments)
        except Exception as error:
            self._maps.release()  # the sender removes its segments after a failure
            if self.parallel_config.world_size == 1:
                raise
            self._failure = f"{type(error).__name__}: {error}"

    def _open_channel(self, init_info: ChannelInfo) -> None:
        self.shutdown()
        if not init_info.holds:
            self._decoder = WholeDecoder()
        elif not self._decoder.copies:
            # An existing decoder with copies is kept: a broadcast opens a new channel when its engines change.
            from megatron_rl.rollout.weight_sync.changed_decoder import ChangedDecoder

            self._decoder = ChangedDecoder()
        if init_info.channel == "broadcast":
            self._group = join_group(
                init_info.address,
                init_info.port,
                init_info.first_rank + self._worker_rank(),
                init_info.world_size,
                init_info.group_backend,
                timedelta(seconds=init_info.deadline_s),
            )
        self._has_channel = True

    def _worker_rank(self) -> int:
        parallel = self.parallel_config
        return parallel.data_parallel_index * parallel.world_size + parallel.rank

    def start_weight_update(self) -> None:
        if self._has_channel:
            self._failure = ""
        self._attempt(self._start)

    def _start(self) -> None:
        if self._broken:
            raise RuntimeError(
                f"vLLM could not load an earlier sync's weights ({self._broken}); start this engine anew"
            )
        if self._open:
            drop_half_loaded(self.model, self.model_config)
            self._open = False
        self.receipt = {"version": -1, "checksum": "", "num_tensors": 0}
        self._ended, self._tally, self._arrived, self._loaded = None, Tally(), {}, set()
        self._decoder.begin()
        self._maps.release()
        if self._adapters is None:
            self._open_model()
        else:
            self._adapters.begin()

    def _open_model(self) -> None:
        """Start vLLM's layerwise reload, and require that all of the model's parameters arrive in this sync.

        An engine that takes adapters apart from the weights calls this only when the sync's first
        model weight arrives.
        """
        self._has_weights = False
        if self.device.type == "cpu":
            forget_packed_experts(self.model)
        # A tied parameter has one name here. After the reload's start it is listed under both names.
        own_names = {plain(name) for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)
        self._wanted = own_names & {plain(name) for name, _ in self.model.named_parameters()}
        self._wanted_values = count_values(self.model, self._wanted)
        self._open = True

    def update_weights(self, update_info: dict) -> None:
        # The base class's method synchronises an accelerator, which a CPU host lacks.
        self._attempt(lambda: self.receive_weights(self.parse_update_info(update_info)))
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def receive_weights(self, update_info: BucketInfo) -> None:
        match update_info.kind:
            case "bucket":
                self._take(update_info)
            case "end":
                self._check_end(update_info)
            case other:
                raise ValueError(f"a weight update of kind {other!r}; this receiver knows bucket and end")

    def _take(self, bucket: BucketInfo) -> None:
        # Get the bucket's bytes, and check them.
        bucket.tensors, packed = self._decoder.decode(bucket.tensors, bucket.difference, self._packed(bucket))
        if self._decoder.copies and not self._in_place:
            packed = packed.to(self.device, non_blocking=True)
        self._check_bytes(bucket, packed)
        weights = [(name, view_of(packed, dtype, shape, start)) for name, dtype, shape, start in bucket.tensors]
        # Count the weights, and let vLLM load them.
        self._tally.add(bucket.checksum, len(weights))
        for name, tensor in weights:
            if name in self._arrived:
                raise ValueError(f"weight {name!r} arrived twice; a sync brings every weight once")
            self._arrived[name] = tensor.numel()
        if self._adapters is not None:
            weights = self._adapters.taken_from(weights)
        if not weights:
            return
        if not self._open:
            self._open_model()
        try:
            self._loaded |= {plain(name) for name in self.model.load_weights(weights)}
        except Exception as error:
            # A layer may be half processed, and a later sync could seem to succeed.
            self._broken = f"{type(error).__name__}: {error}"
            raise
        if self._in_place and not self._decoder.copies:
            keep_waiting(self.model, packed, self.device)

    @property
    def failure(self) -> str:
        return self._failure

    @property
    def _in_place(self) -> bool:
        """Return whether each worker loads only its slices of the tensors, directly from the sender's memory.

        True if the engine has several workers, unless a broadcast has already brought each worker a
        copy. A single worker needs the tensors whole, and copies the bucket at once.
        """
        return self._group is None and self.parallel_config.world_size > 1

    def _check_bytes(self, bucket: BucketInfo, packed: torch.Tensor) -> None:
        """Raise ValueError if the bucket's bytes differ from what the trainer packed.

        A bucket has NUM_PARTS ranges of bytes, each with a digest. Several workers that read the
        sender's memory each check some ranges. Otherwise each worker checks all.

        packed: uint8, the bytes of the whole bucket.
        """
        parallel = self.parallel_config
        shared = self._in_place and not self._decoder.copies
        parts = parts_of(parallel.rank, parallel.world_size) if shared else range(NUM_PARTS)
        digests = part_digests(packed, parts, self.device).tolist()
        wrong = [part for part, seen in zip(parts, digests, strict=True) if seen != bucket.digests[part]]
        if wrong or checksum_of(bucket.tensors, len(packed), bucket.digests) != bucket.checksum:
            names = f"{bucket.tensors[0][0]} ... {bucket.tensors[-1][0]}"
            raise ValueError(
                f"the bucket {names} of checksum {bucket.checksum} did not arrive as it was sent: "
                + (f"its part {wrong[0]} of {NUM_PARTS} has another digest" if wrong else "its digests are others")
            )

    def _packed(self, bucket: BucketInfo) -> torch.Tensor:
        """Return the bytes sent for a bucket, uint8: a view of the trainer's memory, or a copy on this device.

        A copy is needed because vLLM keeps tensors until their layer is complete. The sender may
        overwrite its memory with the next bucket before that.
        """
        num_bytes = self._decoder.sent_bytes(bucket.num_bytes, bucket.difference)
        if self._group is not None or not num_bytes:
            return receive(self._group, num_bytes, self.device)
        # The trainer's GPU is the first that this engine sees.
        shared = open_storage(bucket.storage, 0) if bucket.storage else self._maps.bytes_of(bucket.segment)
        if len(shared) < num_bytes:
            raise ValueError(f"the segment {bucket.segment} holds {len(shared):,} bytes and the bucket {num_bytes:,}")
        sent = shared[:num_bytes]
        return sent if self._in_place or self._decoder.copies else sent.to(self.device, non_blocking=True, copy=True)

    def _check_end(self, end: BucketInfo) -> None:
        # Compare the totals of the sender with what arrived.
        arrived = (self._tally.count, self._tally.value())
        if arrived != (end.num_tensors, end.checksum):
            raise ValueError(
                f"{arrived[0]} tensors arrived with checksum {arrived[1]}, the trainer sent {end.num_tensors}, "
                f"{end.checksum}"
            )
        if self._open:
            self._check_model()
        elif not self._has_weights:
            raise ValueError("adapters arrived without their base weights, which this engine does not hold")
        if self._adapters is not None:
            self._adapters.build(end.adapter, self.model.lora_manager)
        self._ended = end

    def _check_model(self) -> None:
        # Every parameter must be filled completely.
        missing = sorted(self._wanted - self._loaded)
        if missing:
            raise ValueError(
                f"{len(missing)} of the engine's {len(self._wanted)} parameters did not arrive: "
                f"{', '.join(missing[:8])}"
            )
        partial = partial_layers(self.model)
        if partial:
            raise ValueError(f"{len(partial)} of the engine's layers arrived in part: {', '.join(partial[:8])}")
        # vLLM ignores values that it does not need. So compare the number of values.
        aliases = {plain(name) for name, _ in self.model.named_parameters(remove_duplicate=False)} - self._wanted
        apart = () if self._adapters is None else self._adapters.tensors
        values = sum(n for name, n in self._arrived.items() if name not in aliases and name not in apart)
        if self.parallel_config.world_size == 1 and values != self._wanted_values:
            raise ValueError(
                f"{values:,} values arrived and the engine's parameters have {self._wanted_values:,}: a weight has "
                "another shape there, or the engine has no such weight"
            )

    def finish_weight_update(self) -> None:
        self._attempt(self._finish)

    def _finish(self) -> None:
        if self._ended is None:
            raise RuntimeError(
                "finish_weight_update without the sync's end: what arrived may be part of the weights only"
            )
        if self._open:
            finalize_layerwise_reload(self.model, self.model_config)
            self._open, self._has_weights = False, True
            process_tied(self.model)
        self._decoder.end()
        self._maps.release()
        if self._adapters is None or self._adapters.model is None:
            self._sign()

    def use_adapter(self) -> None:
        self._attempt(self._use_adapter)

    def _use_adapter(self) -> None:
        if self._ended is None or self._adapters is None or self._adapters.model is None:
            raise RuntimeError("no sync has brought adapters that could be used")
        self._adapters.put_in_place(self.model.lora_manager)
        self._sign()

    def _sign(self) -> None:
        end = self._ended
        self.receipt = {"version": end.version, "checksum": end.checksum, "num_tensors": end.num_tensors}

    def shutdown(self) -> None:
        self._maps.release()
        if self._group is not None:
            self._group.abort()  # NCCL's kernels may still wait in a group that broke off
        self._group = None


class Receiver:
    """Adds methods to vLLM's workers (``worker_extension_cls``), for calls by ``collective_rpc``."""

    def weights_received(self) -> dict:
        """Return this worker's receipt of the latest sync: version, checksum, number of tensors, and failure.

        The version is −1 before the first sync, during a sync, and after a sync that failed. The
        failure is an error text; "" if there is none. If a drafter has weights of its own, the
        receipt has their checksums too (``FrozenDrafter.receipt``), unless a sync is under way.
        """
        engine = self.weight_transfer_engine
        receipt = engine.receipt | {"failure": engine.failure}
        if engine.frozen_drafter is None or self._weight_update_active:
            return receipt
        return receipt | {"drafter": engine.frozen_drafter.receipt()}

    def freeze_drafter(self) -> None:
        """Remember the weights that the drafter has at the engine's start; do nothing for one without weights.

        Raises RuntimeError for a draft model that was not loaded from its files.
        """
        engine, drafter = self.weight_transfer_engine, self.get_draft_model()
        if engine.frozen_drafter is not None or not isinstance(drafter, torch.nn.Module):
            return
        settings = self.vllm_config.speculative_config
        if settings.uses_draft_model() and "is_from_files" not in vars(drafter):
            raise RuntimeError(
                f"vLLM {vllm.__version__} loaded the draft model {settings.model} in another way than 0.32.0, so it "
                "may have random weights; install vllm==0.32.0, or set rollout.speculation=off"
            )
        engine.frozen_drafter = FrozenDrafter(self.model_runner.get_model(), drafter, settings.model)

    def attach_drafter(self) -> None:
        """Give the drafter of ``rollout.speculation=history`` this worker's batches, and the weights' version."""
        engine = self.weight_transfer_engine
        self.model_runner.drafter.attach(self.model_runner, lambda: engine.receipt["version"])

    def load_history(self, path: str) -> None:
        """Give that drafter the earlier answers in a file."""
        self.model_runner.drafter.load_history(path)

    def abandon_weight_update(self) -> None:
        """End a weight update that this or an earlier trainer left unfinished, so that a new update may start.

        vLLM (0.32.0, gpu_worker.py) itself ends an unfinished update only after an error.
        """
        self._weight_update_active = False
        self.weight_transfer_engine.reset_weight_update_target()

    def use_adapter(self) -> None:
        """Make the engine compute with the adapters of the sync that was just finished.

        This call comes after the finish, at which vLLM (0.32.0, gpu_worker.py) drops all adapters.
        """
        self.weight_transfer_engine.use_adapter()

    def describe(self) -> dict:
        """Return the facts that a trainer checks before its first sync, and remember the drafter's weights."""
        self.freeze_drafter()
        model, config = self.vllm_config.model_config, self.vllm_config
        return {
            "routed_experts": hasattr(config, "aux_output_config")
            and config.aux_output_config.enable_return_routed_experts,
            "vocab_size": model.get_vocab_size(),
            "max_model_tokens": model.max_model_len,
            "logprobs_mode": model.logprobs_mode,
            "dtype": str(model.dtype).removeprefix("torch."),
        }


load_from_files()  # vLLM imports this module before it loads a model
if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, ReceivingEngine)
