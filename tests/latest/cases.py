"""Stages and passes that test_fake_device.py runs on a device that is not there, and how often each may wait for it."""

from dataclasses import dataclass, field

NUM_MICROBATCHES = 3
LENGTHS = (12, 8)  # tokens of each micro-batch's two sequences: all are as long, so that what a host reads is known

# The known places, all of megatron-core 0.19.2. Two stages that meet ask for the shape and wait, for each transfer.
TRANSFER = "megatron.core.pipeline_parallel.p2p_communication._communicate: synchronize"
# A mixture's layer waits for the numbers of tokens that its experts get.
EXPERTS = "megatron.core.transformer.moe.token_dispatcher._maybe_dtoh_and_synchronize: synchronize"


def transfers(num: int) -> dict[str, int]:
    """Return the questions of ``num`` exchanges with a peer stage: one each, after the tensors.

    Megatron-Core guards against an old fault of batch_isend_irecv so; the shapes before them come from the plan.
    """
    return {TRANSFER: num}


def nothing(*passes: str) -> dict[str, dict[str, int]]:
    return {name: {} for name in passes}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Describes a rank of a world, and the passes over its stage.

    questions: by pass ("logprob", "train", "supervised", "values", "critic"), how often the host waits for the device
               over all its micro-batches, by place.
    layers: of the model; None for the default.
    mistake: planted before the passes (fake_passes.py); None for none.
    """

    family: str = "qwen2_untied"
    overrides: tuple[str, ...] = ()
    world: int = 1
    rank: int = 0
    questions: dict[str, dict[str, int]] = field(default_factory=lambda: nothing("logprob", "train"))
    layers: int | None = None
    mistake: str | None = None


def _stage(rank: int, *, logprob: dict[str, int], train: dict[str, int]) -> Case:
    return Case(world=3, rank=rank, overrides=("parallel.pipeline=3",), questions={"logprob": logprob, "train": train})


def _mixture(**more) -> Case:
    layers = 2 * NUM_MICROBATCHES
    return Case(family="qwen3_moe", questions={"logprob": {EXPERTS: layers}, "train": {EXPERTS: layers}}, **more)


M = NUM_MICROBATCHES
# Kernels of a layer's forward pass, and what a layer keeps is compared with the forecast: four products, two norms (and
# two of q and k), attention and its copy of v, three kernels for each of q and k to turn them, SwiGLU's two (compiled
# one), the bias of q, k and v, and two sums.
KEPT = {"qwen2_untied": 19, "qwen3": 20}
RECOMPUTED = ("granularity=full", "method=uniform", "num_layers=1")
CASES: dict[str, Case] = {
    "dense": Case(questions=nothing("logprob", "train", "supervised")),
    "float32": Case(overrides=("model.dtype=float32",)),
    "tied": Case(family="qwen3"),
    "entropy and KL": Case(overrides=("loss.entropy_coefficient=0.1", "loss.kl_coefficient=0.1")),
    "sequence ratio": Case(overrides=("loss.policy=gspo",)),
    # 1F1B turns a stage's send and the next receive into one exchange where both go to the same peer.
    "embedding": _stage(0, logprob=transfers(M), train=transfers(5)),
    "middle": _stage(1, logprob=transfers(2 * M), train=transfers(9)),
    "head": _stage(2, logprob=transfers(M), train=transfers(4)),
    "mixture": _mixture(),
    "expert parallel": _mixture(world=2, rank=1, overrides=("parallel.expert=2",)),
    "lora": Case(overrides=("lora.rank=4",)),
    "critic": Case(questions=nothing("values", "critic")),
    "context parallel": Case(world=2, rank=1, overrides=("parallel.context=2",)),
    "tensor parallel": Case(world=2, rank=1, overrides=("parallel.tensor=2", "parallel.sequence_parallel=true")),
    "recomputation": Case(overrides=tuple(f"megatron.transformer.recompute_{each}" for each in RECOMPUTED)),
    **{f"{family}, {layers} layers": Case(family=family, layers=layers) for family in KEPT for layers in (2, 4)},
}

MISTAKES = {
    "host tensor": "two different devices|FakeTensorDeviceMismatchError", "item": "DataDependentOutputException",
    "if": "DataDependentOutputException", "mask": "DynamicOutputShapeException",
    "nonzero": "DynamicOutputShapeException", "tolist": "DataDependentOutputException",
    "to the host": "copy from cuda to cpu", "to the device": "copy from cpu to cuda",
    "synchronize": "asking: synchronize",
}
"""What a planted mistake gives: an error, or a question at a place that is not known."""

SPOILED = {f"with {mistake}": Case(questions=nothing("train"), mistake=mistake) for mistake in MISTAKES}
