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
}
FAULTS = {
    "drop-gradient": "halves the last rank's gradient before the reduction: `gradient` must fail",
    "wrong-weight": "moves the last rank's weights before the log-prob pass: `logprobs` must fail",
    "drop-survivor": "the skip run drops a sample that has signal: `skip` must fail",
    "repack": "repacks where nothing may be repacked: `bitwise` must fail",
    "freeze-ghost": "the ghost step moves nothing: `ghost` must fail",
    "stale-replica": "moves the last rank's weights after the last step: `replicas` must fail (data parallel >= 2)",
    "no-ghost-gather": "the ghost step ends without its parameter gather: `replicas` must fail (dp2-overlap)",
    "hang": "the last rank never joins: the cell must fail when its time is up",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Describes one row of the matrix: a feature on a layout.

    needs: a module without which the cell is not run.
    """

    name: str
    feature: str
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    data: int = 1
    dtype: str = "float32"
    family: str = "qwen2_tied"
    overrides: tuple[str, ...] = ()
    needs: str = ""
    min_buckets: int = 1

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def layout(self) -> str:
        sizes = (("TP", self.tensor), ("PP", self.pipeline), ("CP", self.context), ("DP", self.data))
        return " · ".join(f"{axis}{size}" for axis, size in sizes if size > 1) or "one process"

    @property
    def checks(self) -> tuple[str, ...]:
        """Return the names of the checks; each must have a result for the cell to pass."""
        return tuple(x for x in LABELS if self.data > 1 or x not in ("silent", "replicas"))


def tolerances(dtype: str, *, cuda: bool) -> dict[str, float]:
    """Return the largest error allowed per check.

    float32: another order of summation, seen 3e-7 to 1e-6 on a CPU; on a GPU, TF32 off, the kernels differ from the
        reference's too, and TF32 left on would show at 1e-3. A token weight lost or counted twice shows at 1e-2 and
        above.
    bfloat16: 8 bits of mantissa, 4e-3 per rounding, through 4 layers of weights three times their usual size, against a
        float32 reference of the same rounded weights; skip and dense differ in rounding only by packing other samples
        together.
    The other checks are exact in any dtype.
    """
    exact = {"bitwise": 0.0, "ghost": 0.0, "replicas": 0.0}
    if dtype == "bfloat16":
        return {"logprobs": 0.1, "gradient": 5e-2, "skip": 2e-2, "silent": 5e-2, **exact}
    relative = 1e-4 if cuda else 1e-5
    return {"logprobs": 1e-4, "gradient": relative, "skip": relative, "silent": relative, **exact}


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
    return tuple(cells)


CELLS = _cells()
