"""Use MegatronBackend as a library: one optimizer step from two forward_backward calls, then the weights.

Purpose: the code to write when you bring your own loop, without train.py.   Cost: seconds.
Launch:  torchrun --nproc_per_node 2 examples/library/one_step.py runs/quickstart/inputs/model parallel.pipeline=2
"""

import sys

import numpy as np

from megatron_rl.algorithm.advantage import advantages, reduction_weights
from megatron_rl.algorithm.estimators import GroupRewards
from megatron_rl.algorithm.signal import has_signal
from megatron_rl.backend import MegatronBackend
from megatron_rl.config import load_config
from megatron_rl.types import LossInputs, Sample

if len(sys.argv) < 2 or "=" in sys.argv[1]:
    print(
        f"The first argument is the folder of a Hugging Face model; settings follow it.\n\n{__doc__}", file=sys.stderr
    )
    sys.exit(2)
backend = MegatronBackend(
    load_config(None, [f"model.hf_path={sys.argv[1]}", "train.samples_per_mini_batch=4", *sys.argv[2:]])
)
rank, world = backend.topology.rank, backend.topology.world_size

# Two groups of four samples; this rank contributes every world-th. The second group's equal rewards carry no signal.
rewards, groups = np.array([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]), [0, 0, 0, 0, 1, 1, 1, 1]
tokens = [np.array([5, 6, 7, 3 + i % 8, 2]) for i in range(8)]
places = list(range(rank, 8, world))
samples = [
    Sample(
        sample_id=f"s{i}",
        prompt_tokens=3,
        token_ids=tokens[i],
        loss_mask=np.ones(2, bool),
        logprobs=np.zeros(2, np.float32),
    )
    for i in places
]
batch = backend.gather(samples, [groups[i] for i in places], places)
group_rewards = GroupRewards(totals=rewards, groups=batch.facts.groups, included=np.ones(8, bool))
values = advantages(group_rewards, estimator="grpo")
signal = has_signal(values, batch.facts.loss_tokens)
old = backend.logprobs(batch, signal).flat

plan = backend.plan_training(batch, signal, drops=True)
batch = backend.fetch_rows(batch, plan)
for number, mini_batch in enumerate(plan.mini_batches):
    weights = reduction_weights("token_mean", batch.facts, mini_batch.members, max_response_tokens=2)
    inputs = LossInputs(advantages=values * weights, weights=weights, old_logprobs=old)
    for _ in range(2):  # gradients add; they are reduced and finalized once, in optim_step
        backend.forward_backward(batch, mini_batch, inputs, fingerprint=plan.fingerprints()[number])
    result = backend.optim_step(mini_batch.kind)
    print(
        f"rank {rank}: {result.kind.value}, gradient norm {result.grad_norm:.4f}, {len(mini_batch.dropped)} samples "
        "dropped",
        flush=True,
    )
print(f"rank {rank}: {sum(tensor.numel() for _, tensor in backend.export())} weights exported", flush=True)
backend.close()
