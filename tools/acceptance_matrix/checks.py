"""Runs one cell of the support matrix in its process group, and measures the checks of cells.EQUALITY on a tiny model.

A cell of another kind is measured by the module that its kind names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import json
import os
import pathlib
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from acceptance_matrix.cells import HIDDEN, LAYERS, Cell

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))  # tests/reference.py

from megatron_rl.algorithm.advantage import reduction_weights
from megatron_rl.algorithm.signal import has_signal
from megatron_rl.backend import MegatronBackend
from megatron_rl.backend.batch import Batch
from megatron_rl.config import load_config
from megatron_rl.distributed import topology
from megatron_rl.distributed.collectives import gather_json
from megatron_rl.distributed.platform import HOST
from megatron_rl.types import BatchPlan, LossInputs, Sample, StepKind
from megatron_rl.weights.export import export_weights
from tests.reference import (
    file_weights,
    make_samples,
    reference_gradient,
    reference_logprobs,
    relative_error,
    tiny_model,
)

NUM_SAMPLES = 12
GROUPS = [i // 2 for i in range(NUM_SAMPLES)]
# Every other pair is dead, the live ones have both signs.
ADVANTAGES = np.where(np.arange(NUM_SAMPLES) % 4 < 2, 0.0, np.linspace(-1, 1, NUM_SAMPLES))
# The first of three pairs that each of two ranks gets is dead on both.
ROWS_DEAD = np.where(np.arange(NUM_SAMPLES) % 6 < 4, 0.0, np.linspace(-1, 1, NUM_SAMPLES))
ONE_ALIVE = np.where(np.arange(NUM_SAMPLES) == 3, 0.7, 0.0)
# Old log-probs lie this far from the current ones: ratios 0.61, 1 and 1.65, some clipped (at 0.8, 1.2), none near the
# edge of clipping, since bfloat16 could fall on its other side.
SHIFTS = np.array([-0.5, 0.0, 0.5], dtype=np.float32)
DEFAULTS = (
    "plan.max_tokens_per_microbatch=40",
    "rollout.max_response_tokens=16",
    "optimizer.lr=1e-3",
    "optimizer.weight_decay=0.1",
)


@dataclasses.dataclass(kw_only=True)
class Bench:
    """Holds a backend, the reference model of the same weights, and a batch that is the same on every rank."""

    cell: Cell
    fault: str
    backend: MegatronBackend
    model: torch.nn.Module
    samples: list[Sample]
    batch: Batch

    @property
    def is_last(self) -> bool:
        """Return True on the last rank, on which faults are planted."""
        return self.backend.topology.rank == self.backend.topology.world_size - 1

    def plan(self, advantages: np.ndarray, *, drops: bool) -> BatchPlan:
        signal = has_signal(advantages, self.batch.facts.loss_tokens)
        plan = self.backend.plan_training(self.batch, signal, drops=drops)
        self.batch = self.backend.fetch_rows(self.batch, plan)
        return plan

    def accumulate(self, advantages: np.ndarray, plan: BatchPlan) -> StepKind:
        (mini_batch,) = plan.mini_batches
        weights = reduction_weights("token_mean", self.batch.facts, mini_batch.members, max_response_tokens=16)
        old = np.concatenate([s.logprobs for s in self.samples])
        inputs = LossInputs(advantages=advantages * weights, weights=weights, old_logprobs=old)
        self.backend.forward_backward(self.batch, mini_batch, inputs, fingerprint=plan.fingerprints()[0])
        return mini_batch.kind

    def gradient(self, advantages: np.ndarray, plan: BatchPlan) -> dict[str, torch.Tensor]:
        self.accumulate(advantages, plan)
        if self.fault == "drop-gradient" and self.is_last:
            for buffer in (
                x for chunk in self.backend.chunks for x in (*chunk.buffers, *chunk.expert_parallel_buffers)
            ):
                buffer.grad_data.mul_(0.5)
        gradient = self.backend.gradient()
        self.backend.zero_grad()
        return {name: x.float().cpu() for name, x in gradient.items()}

    def reference(self, advantages: np.ndarray, found: dict[str, torch.Tensor]) -> float:
        """Return the relative error against the reference on the main rank, and 0 on the others."""
        if not self.backend.topology.is_main:
            return 0.0
        return relative_error(found, reference_gradient(self.model, self.samples, GROUPS, advantages.tolist())[0])

    def move_weights(self, by: float) -> None:
        for chunk in self.backend.chunks:
            for parameter in chunk.module.parameters():
                parameter.data.add_(by)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights of this moment, without a parameter gather.

        ``backend.export`` gathers first, and would mend the very fault that the check is to find.
        """
        parameters = [dict(chunk.module.named_parameters()) for chunk in self.backend.chunks]
        tensors = export_weights(parameters, self.backend.shape, self.backend.topology)
        return {name: x.float().cpu().clone() for name, x in tensors}


@contextlib.contextmanager
def open_bench(cell: Cell, fault: str, deadline_s: float) -> Iterator[Bench]:
    hf_config, model = tiny_model(cell.family, layers=LAYERS, hidden=HIDDEN)
    if cell.dtype == "bfloat16":  # so that only the arithmetic's rounding is measured, not the weights'
        model = model.bfloat16().float()
    overrides = [f"parallel.{degree}" for degree in cell.parallel]
    overrides += [f"model.dtype={cell.dtype}", *DEFAULTS, f"run.deadline_s={deadline_s}", *cell.overrides]
    if fault == "freeze-ghost":
        overrides.append("skip.ghost=freeze")
    if HOST.is_cuda:
        overrides.append("megatron.transformer.deterministic_mode=true")
    samples = make_samples(NUM_SAMPLES)
    with torch.no_grad():
        now = [reference_logprobs(model, s)[0].numpy() for s in samples]
    samples = [
        dataclasses.replace(s, logprobs=x + np.resize(SHIFTS, len(x))) for s, x in zip(samples, now, strict=True)
    ]
    backend = MegatronBackend(
        load_config(None, overrides), hf_config=hf_config, weights=file_weights(model), total_steps=10
    )
    try:
        mine = [i for i in range(NUM_SAMPLES) if i % backend.topology.world_size == backend.topology.rank]
        batch = backend.gather([samples[i] for i in mine], [GROUPS[i] for i in mine], mine)
        yield Bench(cell=cell, fault=fault, backend=backend, model=model, samples=samples, batch=batch)
    finally:
        topology.destroy()


def check_logprobs(bench: Bench) -> float:
    if bench.fault == "wrong-weight" and bench.is_last:
        bench.move_weights(0.01)
    logprobs = bench.backend.logprobs(bench.batch, np.ones(NUM_SAMPLES, dtype=bool)).flat
    if bench.fault == "wrong-weight" and bench.is_last:
        bench.move_weights(-0.01)
    with torch.no_grad():
        wanted = np.concatenate([reference_logprobs(bench.model, s)[0].numpy() * s.loss_mask for s in bench.samples])
    return float(np.abs(logprobs - wanted).max())


def check_gradients(bench: Bench) -> dict[str, float]:
    dense = bench.gradient(ADVANTAGES, bench.plan(ADVANTAGES, drops=False))
    lost = bench.fault == "drop-survivor"
    plan = bench.plan(np.where(np.arange(NUM_SAMPLES) == 11, 0.0, ADVANTAGES) if lost else ADVANTAGES, drops=True)
    assert len(plan.mini_batches[0].dropped) >= NUM_SAMPLES // 2, plan.mini_batches[0].dropped
    errors = {
        "gradient": bench.reference(ADVANTAGES, dense),
        "skip": relative_error(bench.gradient(ADVANTAGES, plan), dense),
    }
    if bench.backend.topology.data_size > 1:
        plan = bench.plan(ONE_ALIVE, drops=True)
        step = plan.mini_batches[0]  # experts' ranks keep in step with fillers, and none is silent
        assert step.silent_ranks + step.num_fillers == bench.backend.topology.data_size - 1, plan.to_json()
        errors["silent"] = bench.reference(ONE_ALIVE, bench.gradient(ONE_ALIVE, plan))
    return errors


def check_bitwise(bench: Bench) -> float:
    """Drop whole micro-batches, cut before the drop, and compare: they must have added exact zeros."""
    usual = bench.backend.rules
    bench.backend.rules = dataclasses.replace(usual, repack=False, samples_per_microbatch=2)
    dense = bench.gradient(ROWS_DEAD, bench.plan(ROWS_DEAD, drops=False))
    if bench.fault == "repack":
        bench.backend.rules = dataclasses.replace(usual, repack=True, samples_per_microbatch=3)
    plan = bench.plan(ROWS_DEAD, drops=True)
    assert plan.mini_batches[0].microbatches_dropped > 0, plan.to_json()
    skip = bench.gradient(ROWS_DEAD, plan)
    bench.backend.rules = usual
    return difference(skip, dense)


def difference(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Return the largest absolute difference; 0.0 only if every tensor is equal to the bit (-0.0 counts as 0.0)."""
    assert set(found) == set(wanted), sorted(set(found) ^ set(wanted))
    return max(0.0 if torch.equal(found[k], wanted[k]) else float((found[k] - wanted[k]).abs().max()) for k in wanted)


def trajectory(bench: Bench, *, ghost: bool) -> tuple[list[dict[str, torch.Tensor]], list[str]]:
    """Return weights after the second and the third of three steps, and every rank's digest of both.

    The three steps are real, without signal, and real.
    """
    if bench.fault == "no-ghost-gather":
        bench.backend.optimizer._end_parameter_gather = lambda: None
    snapshots = []
    for step, advantages in enumerate((ADVANTAGES, np.zeros(NUM_SAMPLES), ADVANTAGES)):
        kind = bench.accumulate(advantages, bench.plan(advantages, drops=ghost and step == 1))
        assert (kind is StepKind.GHOST) == (ghost and step == 1)
        bench.backend.optim_step(kind)
        # Under overlap_param_gather, a forward pass between steps leaves a parameter gather pending.
        bench.backend.logprobs(bench.batch, np.ones(NUM_SAMPLES, dtype=bool))
        if step == 2 and bench.fault == "stale-replica" and bench.is_last:
            bench.move_weights(1e-3)
        if step > 0:
            snapshots.append(bench.weights())
    # After the second step too: a third that gathers would mend what differed.
    digest = hashlib.sha256(
        b"".join(x.numpy().tobytes() for weights in snapshots for x in weights.values())
    ).hexdigest()
    return snapshots, gather_json(digest)


def measure(cell: Cell, fault: str, deadline_s: float, folder: pathlib.Path | None = None) -> dict:
    """Return every check's error, the worst over ranks, and the kernels and backend that the cell ran on."""
    with open_bench(cell, fault, deadline_s) as bench:
        if fault == "hang" and bench.is_last:
            time.sleep(3600)
        buckets = sum(len(group.buckets) for group in bench.backend.chunks[0].bucket_groups)
        assert buckets >= cell.min_buckets, (
            f"{buckets} buckets, and fewer than {cell.min_buckets} hide the order of reductions"
        )
        errors = {"logprobs": check_logprobs(bench), **check_gradients(bench)}
        if "bitwise" in cell.checks:
            errors["bitwise"] = check_bitwise(bench)
        facts = {
            "layer_spec": bench.backend.shape.layer_spec,
            "adam": bench.backend.optimizer.kernel,
            "backend": HOST.backend,
        }
    with open_bench(cell, fault, deadline_s) as bench:
        ghost, digests = trajectory(bench, ghost=True)
    with open_bench(cell, fault, deadline_s) as bench:
        zeros, _ = trajectory(bench, ghost=False)
        errors["ghost"] = max(difference(a, b) for a, b in zip(ghost, zeros, strict=True))
        if cell.data > 1:
            errors["replicas"] = float(sum(x != digests[0] for x in digests))
        everyone = np.array(gather_json(list(errors.values())))
    # A NaN on any rank stays one in the maximum.
    return {"errors": dict(zip(errors, everyone.max(axis=0).tolist(), strict=True)), **facts}


def _exit_with_parent() -> None:
    """Exit when the starting process has closed stdin: then no process waits for this cell.

    stdin is a pipe that the starting process holds open and never writes to.
    """
    while os.read(0, 1):
        continue
    os._exit(1)


def run(cell: Cell, out: pathlib.Path, *, fault: str, deadline_s: float) -> None:
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    if HOST.is_cuda:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        torch.use_deterministic_algorithms(True, warn_only=True)
    result = importlib.import_module(f"acceptance_matrix.{cell.kind}").measure(
        cell, fault, deadline_s, out.parent / cell.name
    )
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()
