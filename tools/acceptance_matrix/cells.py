"""Lists the cells of the support matrix and the checks that each must pass, as data only.

tools/acceptance.py starts the cells, acceptance_matrix/checks.py runs one.
"""

from __future__ import annotations

from dataclasses import dataclass

HIDDEN = 128  # 4 heads of 32 (qwen3: 64): sizes that Transformer Engine's attention kernels have
LAYERS = 4

LABELS = {
    "logprobs": "log-probs against Hugging Face (absolute)",
    "gradient": "gradient of the dense run against the reference (relative)",
    "skip": "gradient of the skip run against the dense run's (relative)",
    "bitwise": "whole micro-batches dropped, nothing repacked: gradients to the bit",
    "ghost": "ghost step against a step with zero gradients: weights to the bit, and again one real step later",
    "silent": "gradient with silent data-parallel ranks against the reference (relative)",
    "replicas": "ranks that differ after a real and a ghost step, or after one more real step (count)",
    "moved": "adapters after three steps against AdamW on a Hugging Face model (relative)",
    "export": "exported weights against W + alpha / rank · B A (relative)",
    "frozen": "frozen weights that three steps of adapters changed (count)",
    "values": "critic's values against a Hugging Face reward model (absolute)",
    "offload": "weights and AdamW's tensors that differ from a run without offload (count)",
    "held": "share of the offloaded bytes that the device still holds",
    "checkpoint": "weights and AdamW's tensors that differ after save, load and two more steps (count)",
    "delivered": "tensors that reached another process with other bytes, or not at all (count)",
    "engine": "log-probs of the engine's tokens against the trainer's (mean absolute)",
    "gap": "log-probs of the engine's tokens against the trainer's, in every step (largest absolute)",
    "memory": "peak memory of the log-probs with their gradient over that with whole logits (ratio)",
    "speed": "seconds of the skip update over the dense update, 75 % of the groups dead (ratio)",
}
# The checks of each kind of cell; the kind names the module of acceptance_matrix/ that measures it.
EQUALITY = ("logprobs", "gradient", "skip", "bitwise", "ghost", "silent", "replicas")
KINDS = {
    "checks": EQUALITY,
    "adapter": ("gradient", "skip", "moved", "export", "frozen"),
    "critic": ("values", "gradient"),
    "routing": ("logprobs", "gradient"),
    "offload": ("offload", "held"),
    "checkpoint": ("checkpoint",),
    "channel": ("delivered",),
    "rollout": ("engine",),
    "gap": ("gap",),
    "long": ("logprobs", "gradient"),
    "memory": ("memory",),
    "speed": ("speed",),
}
FAULTS = {
    "drop-gradient": "halves the last rank's gradient before the reduction: `gradient` must fail",
    "wrong-weight": "moves the last rank's weights before the log-prob pass: `logprobs` must fail",
    "drop-survivor": "the skip run drops a sample that has signal: `skip` must fail",
    "repack": "repacks where nothing may be repacked: `bitwise` must fail",
    "freeze-ghost": "the ghost step moves nothing: `ghost` must fail",
    "stale-replica": "moves the last rank's weights after the last step: `replicas` must fail (data parallel >= 2)",
    "no-ghost-gather": "the ghost step ends without its parameter gather: `replicas` must fail (dp2-overlap)",
    "lose-state": "zeroes one of AdamW's moments while it is away: `offload` and `checkpoint` must fail",
    "keep-memory": "leaves the state on the device: `held` must fail",
    "flip-byte": "changes one byte on its way to the engine: `delivered` must fail",
    "lose-experts": "the routers choose for themselves: `logprobs` and `gradient` of replay must fail",
    "other-weights": "moves the trainer's weights after the engine got them: `engine` must fail",
    "whole-logits": "makes all logits at once: `memory` must fail",
    "run-all": "the skip update runs what it should drop: `speed` must fail",
    "hang": "the last rank never joins: the cell must fail when its time is up",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Describes one row of the matrix: a feature on a layout.

    kind: a key of KINDS.
    needs: a module without which the cell is not run, or "GPU", or "CPU" for a host with no GPU.
    gpus: GPUs that the cell's processes take, where another number than their own count.
    rough: how many times bfloat16's bound on the gradient is allowed.
    """

    name: str
    feature: str
    kind: str = "checks"
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    expert: int = 1
    data: int = 1
    dtype: str = "float32"
    family: str = "qwen2_tied"
    overrides: tuple[str, ...] = ()
    needs: str = ""
    min_buckets: int = 1
    gpus: int = 0
    rough: float = 1.0

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def layout(self) -> str:
        degrees = ("TP", self.tensor), ("PP", self.pipeline), ("VPP", self.virtual), ("CP", self.context)
        sizes = (*degrees, ("EP", self.expert), ("DP", self.data))
        return " · ".join(f"{axis}{size}" for axis, size in sizes if size > 1) or "one process"

    @property
    def checks(self) -> tuple[str, ...]:
        """Return the names of the checks; each must have a result for the cell to pass."""
        left_out = () if self.data > 1 else ("silent", "replicas")
        return tuple(x for x in KINDS[self.kind] if x not in left_out)

    def allowed(self, *, cuda: bool) -> dict[str, float]:
        """Return the largest error allowed per check."""
        bounds = tolerances(self.dtype, cuda=cuda)
        return bounds | {"gradient": bounds["gradient"] * self.rough}

    @property
    def parallel(self) -> tuple[str, ...]:
        """Return the settings of the cell's degrees, without their section."""
        sizes = dict(tensor=self.tensor, pipeline=self.pipeline, virtual_pipeline=self.virtual)
        return tuple(f"{x}={n}" for x, n in dict(sizes, context=self.context, expert=self.expert).items())


def tolerances(dtype: str, *, cuda: bool) -> dict[str, float]:
    """Return the largest error allowed per check.

    float32: another order of summation, seen 3e-7 to 1e-6 on a CPU; on a GPU, TF32 off, the kernels differ from the
        reference's too, and TF32 left on would show at 1e-3. A token weight lost or counted twice shows at 1e-2 and
        above.
    bfloat16: 8 bits of mantissa, 4e-3 per rounding, through 4 layers of weights three times their usual size, against a
        float32 reference of the same rounded weights; skip and dense differ in rounding only by packing other samples
        together.
    The counts and `bitwise` and `ghost` are exact in any dtype. `held` leaves room for a device's rounding of blocks.
    memory, speed: far from what was seen (0.1 and 0.25 to 0.4), so that only a lost feature fails, not a busy machine.
    engine: another program's kernels; weights that did not arrive show at 1 and above.
    """
    counts = ("bitwise", "ghost", "replicas", "frozen", "offload", "checkpoint", "delivered", "gap")
    fixed = {**dict.fromkeys(counts, 0.0), "held": 0.05, "memory": 0.5, "speed": 0.75}
    if dtype == "bfloat16":
        relative = {"gradient": 5e-2, "skip": 2e-2, "silent": 5e-2, "moved": 5e-2, "export": 2e-2}
        return {"logprobs": 0.1, "values": 0.3, "engine": 0.1, **relative, **fixed}
    bound = 1e-4 if cuda else 1e-5
    relative = dict.fromkeys(("gradient", "skip", "silent", "moved", "export"), bound)
    return {"logprobs": 1e-4, "values": 1e-4, "engine": 1e-3, **relative, **fixed}


TORCH = ("model.layer_spec=torch",)
OVERLAP = (
    "megatron.ddp.overlap_grad_reduce=true",
    "megatron.ddp.overlap_param_gather=true",
    "megatron.ddp.bucket_size=20000",
)
RECOMPUTE = (
    "megatron.transformer.recompute_granularity=full",
    "megatron.transformer.recompute_method=uniform",
    "megatron.transformer.recompute_num_layers=1",
)
LAYOUTS = (
    ("single", "one process", {}),
    ("tp2", "tensor parallel", dict(tensor=2)),
    ("tp2-sp", "sequence parallel", dict(tensor=2, overrides=("parallel.sequence_parallel=true",))),
    ("pp2", "pipeline parallel", dict(pipeline=2)),
    ("cp2", "context parallel", dict(context=2)),
    ("cp2-pp2", "context and pipeline parallel", dict(context=2, pipeline=2)),
    ("dp2", "data parallel, distributed optimizer", dict(data=2)),
    ("dp2-plain", "data parallel, distributed optimizer off", dict(data=2, overrides=("optimizer.distributed=false",))),
    ("dp2-overlap", "data parallel, gradient and parameter overlap", dict(data=2, overrides=OVERLAP, min_buckets=8)),
    ("tp2-pp2", "tensor and pipeline parallel", dict(tensor=2, pipeline=2)),
    ("pp2-dp2", "pipeline and data parallel", dict(pipeline=2, data=2)),
)
MORE_LAYOUTS = (
    ("pp2-vpp2", "interleaved pipeline", dict(pipeline=2, virtual=2)),
    ("ep2", "mixture, expert parallel", dict(data=2, expert=2, family="qwen3_moe")),
    ("moe-single", "mixture", dict(family="mixtral")),
    (
        "tp2-ep2",
        "mixture, expert parallel over tensor ranks",
        dict(tensor=2, expert=2, family="mixtral", overrides=("parallel.expert_tensor=1",)),
    ),
    ("ep2-pp2", "mixture, expert and pipeline parallel", dict(pipeline=2, data=2, expert=2, family="qwen3_moe")),
)
SEQUENCE = ("parallel.sequence_parallel=true",)
FAMILIES = ("qwen2_tied", "qwen2_untied", "qwen3", "llama", "llama3_rope")
KERNELS = (("transformer_engine", "transformer_engine"), ("apex", "apex"), ("torch", ""))


def _on(layout: dict, *overrides: str, **given: object) -> dict:
    return {**layout, "overrides": (*layout.get("overrides", ()), *overrides), **given}


def _cells() -> tuple[Cell, ...]:
    layouts = {name: layout for name, _, layout in LAYOUTS}
    # Transformer Engine's attention takes packed sequences in half precision only.
    te = dict(dtype="bfloat16", needs="transformer_engine")
    te_spec = "model.layer_spec=transformer_engine"
    cells = [Cell(name=name, feature=feature, **_on(layout, *TORCH)) for name, feature, layout in LAYOUTS]
    cells += [
        Cell(name=name, feature=feature, **_on(layout, *TORCH, *(SEQUENCE if layout.get("tensor") else ())))
        for name, feature, layout in MORE_LAYOUTS
    ]
    cells += [
        Cell(name=f"bf16-{name}", feature=feature, **_on(layouts[name], *TORCH, dtype="bfloat16"))
        for name, feature in (("single", "one process"), ("pp2-dp2", "pipeline and data parallel"))
    ]
    cells += [Cell(name=f"family-{x}", feature=f"family {x}", family=x, overrides=TORCH) for x in FAMILIES[1:]]
    cells += [
        Cell(name="recompute", feature="full activation recomputation", overrides=(*TORCH, *RECOMPUTE)),
        Cell(
            name="recompute-pp2",
            feature="full activation recomputation, pipeline",
            pipeline=2,
            overrides=(*TORCH, *RECOMPUTE),
        ),
    ]
    cells += [
        Cell(
            name=f"adam-{kernel}",
            feature=f"Adam kernel {kernel}",
            needs=needs,
            overrides=(*TORCH, f"optimizer.kernel={kernel}"),
        )
        for kernel, needs in KERNELS
    ]
    cells += [
        Cell(name=f"te-{name}", feature=f"Transformer Engine layers, {feature}", **_on(layout, te_spec, **te))
        for name, feature, layout in LAYOUTS
    ]
    cells += [
        Cell(
            name=f"te-family-{x}",
            feature=f"Transformer Engine layers, family {x}",
            family=x,
            overrides=(te_spec,),
            **te,
        )
        for x in FAMILIES[1:]
    ]
    cells.append(
        Cell(
            name="te-recompute",
            feature="Transformer Engine layers, recomputation",
            overrides=(te_spec, *RECOMPUTE),
            **te,
        )
    )
    experts = dict(data=2, expert=2, family="qwen3_moe")
    cells.append(Cell(name="te-ep2", feature="Transformer Engine layers, mixture", **_on(experts, te_spec, **te)))
    return tuple(cells)


def _delta_cells() -> list[Cell]:
    """Return the cells of gated delta nets, on torch's kernels and on flash-linear-attention's."""
    # transformers' own gradient in bfloat16 is 5.6e-2 off its float32, where that of qwen3 is 1.7e-2
    torch, half = "gated delta nets, torch's kernels", dict(dtype="bfloat16", rough=2.0)
    layouts = (("", torch, {}), ("-tp2", torch, dict(tensor=2, overrides=SEQUENCE)), ("-bf16", torch, half))
    layouts += (("-fla", "gated delta nets, flash-linear-attention's kernels", dict(needs="fla", **half)),)
    return [
        Cell(
            name=f"delta-net{name}",
            feature=feature,
            family="qwen3_5_text",
            **_on(layout, *TORCH, f"model.delta_kernel={'fla' if name == '-fla' else 'torch'}"),
        )
        for name, feature, layout in layouts
    ]


def _channel_cells() -> list[Cell]:
    """Return the cells of weight sync by each channel, whole and by what changed."""
    cells = [
        Cell(
            name=f"sync-{name.replace('_', '-')}",
            feature=f"weight sync, {name}",
            kind="channel",
            needs="GPU" if name == "cuda_ipc" else "",
            overrides=(f"weight_sync.channel={name}",),
            gpus=2 if name == "broadcast" else 0,
        )
        for name in ("shared_memory", "broadcast", "cuda_ipc")
    ]
    return cells + [
        Cell(
            name=f"delta-{name.replace('_', '-')}",
            feature=f"weight sync of what changed, {name}",
            kind="channel",
            overrides=(f"weight_sync.channel={name}", "weight_sync.delta=true"),
            gpus=2 if name == "broadcast" else 0,
        )
        for name in ("shared_memory", "broadcast")
    ]


def _feature_cells() -> tuple[Cell, ...]:
    """Return the cells that check a feature by a measurement of its own."""
    half = dict(dtype="bfloat16")
    lora, critic = "adapters (LoRA)", "PPO's critic"
    replay = dict(feature="routing replay", kind="routing")
    offload, checkpoint = "offload and restore", "checkpoint, saved and loaded"
    cells = [
        Cell(name="lora", feature=lora, kind="adapter", family="qwen3"),
        Cell(name="lora-tp2-sp", feature=lora, kind="adapter", tensor=2, family="qwen3", overrides=SEQUENCE),
        Cell(name="lora-pp2", feature=lora, kind="adapter", pipeline=2),
        Cell(name="critic", feature=critic, kind="critic"),
        Cell(name="critic-tp2", feature=critic, kind="critic", tensor=2, family="qwen3", overrides=SEQUENCE),
        Cell(name="replay", **replay, family="qwen3_moe", overrides=(*TORCH, *RECOMPUTE)),
        Cell(name="replay-ep2", **replay, data=2, expert=2, family="mixtral", overrides=TORCH),
        Cell(name="replay-vpp2", **replay, pipeline=2, virtual=2, family="qwen3_moe", overrides=(*TORCH, *RECOMPUTE)),
        Cell(name="offload", feature=offload, kind="offload", **half),
        Cell(name="offload-dp2", feature=offload, kind="offload", data=2, **half),
        Cell(name="checkpoint", feature=checkpoint, kind="checkpoint", **half),
        Cell(name="checkpoint-dp2", feature=checkpoint, kind="checkpoint", data=2, **half),
        Cell(name="checkpoint-pp2", feature=checkpoint, kind="checkpoint", pipeline=2),
    ]
    cells += _channel_cells()
    cells += _rollout_cells()
    cells += [
        Cell(name="long", feature="sequences of 8,192 tokens (CPU: 1,024)", kind="long"),
        Cell(name="bf16-long", feature="sequences of 8,192 tokens (CPU: 1,024)", kind="long", **half),
        Cell(name="memory", feature="memory of log-probs without the logits", kind="memory", **half),
        Cell(name="speed", feature="time of the skip update", kind="speed", **half),
    ]
    return tuple(cells)


def _rollout_cells() -> list[Cell]:
    embedded = "rollouts by the embedded engine"
    bits = dict(feature="engine and trainer with equal log-probs, to the bit", kind="gap", needs="CPU")
    longest = ("rollout.start_order=longest_first",)
    awake = "rollout.sleep=never"
    alone = ("lora.rank=8", "weight_sync.adapters=alone", awake)
    engines = (
        ("vllm", "rollouts by vLLM (on a GPU: the trainer's, with sleep)", {}, ()),
        ("vllm-tp2", "the same, engine TP 2", dict(tensor=2), ("rollout.tensor_parallel=2",)),
        ("vllm-delta", "the same, only what changed travels", {}, ("weight_sync.delta=true", awake)),
        ("vllm-adapters", "the same, adapters alone travel", dict(dtype="bfloat16"), alone),  # as a GPU computes them
    )
    return [
        Cell(name="rollout-embedded", feature=embedded, kind="rollout"),
        Cell(name="longest-first", feature=f"{embedded}, longest groups first", kind="rollout", overrides=longest),
        Cell(name="bitwise", **bits, overrides=("rollout.bitwise=true",)),
        Cell(name="bitwise-tp2", **bits, tensor=2, overrides=("rollout.bitwise=true",)),
        *(
            Cell(name=name, feature=x, kind="rollout", needs="vllm", overrides=("rollout.engine=vllm", *more), **layout)
            for name, x, layout, more in engines
        ),
    ]


CELLS = (*_cells(), *_delta_cells(), *_feature_cells())
