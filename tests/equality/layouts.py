"""Settings that several equality tests share, and the tolerance of gradients."""

# Float32 and another order of summation over at most a few hundred terms: seen 3e-7 to 1e-6. A token weight lost, a
# token sent to another expert, a rank's part lost or counted twice shows at 1e-2 and above.
TOLERANCE = 1e-5
REDUCTIONS = ("token_sum", "token_mean", "sequence_mean", "sequence_sum_mean", "sequence_sum_norm", "prompt_mean")
TP2, PP2, CP2, EP2 = (f"parallel.{x}=2" for x in ("tensor", "pipeline", "context", "expert"))
VPP2, ETP1, SP = "parallel.virtual_pipeline=2", "parallel.expert_tensor=1", "parallel.sequence_parallel=true"
PLAIN, SHARDED, BF16 = ("optimizer.distributed=false",), ("optimizer.distributed=true",), ("model.dtype=bfloat16",)
RECOMPUTE = tuple(f"megatron.transformer.recompute_{x}" for x in ("granularity=full", "method=uniform", "num_layers=1"))
OVERLAP = ("megatron.ddp.overlap_grad_reduce=true", "megatron.ddp.bucket_size=1000")
GATHER = (*OVERLAP, "megatron.ddp.overlap_param_gather=true")
MOVING = (  # everything that a step without gradient still moves
    *("optimizer.lr=0.01", "optimizer.weight_decay=0.1", "optimizer.schedule=cosine", "optimizer.warmup_steps=2"),
    *("optimizer.decay_steps=6", "optimizer.min_lr=0.001"),
)
