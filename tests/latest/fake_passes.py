"""Runs every case of cases.py on a device that is not there and prints what happened as JSON: a process of its own."""

import functools
import json
import sys
import traceback

from tests.latest import fake_device  # isort: skip  (before torch is asked for CUDA)

import numpy as np
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from megatron_rl.backend import MegatronBackend, batch_exchange, trainable_model
from megatron_rl.backend.batch import Batch
from megatron_rl.config import load_config
from megatron_rl.critic import Critic
from megatron_rl.distributed import topology
from megatron_rl.model.attention.packed import TorchAttention
from megatron_rl.types import LossInputs, Sample
from tests.latest.cases import CASES, LENGTHS, NUM_MICROBATCHES, SPOILED, Case
from tests.reference import LAYERS, tiny_config

DEFAULTS = (f"plan.max_tokens_per_microbatch={sum(LENGTHS)}", "rollout.max_response_tokens=16", "model.dtype=bfloat16")


class NoOptimizer:
    """Stands for the optimizer, whose step is not run here."""

    masters = None

    def __init__(self, chunks, *_, **__):
        self.chunks = chunks

    def zero_grad(self):
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    def refuse_offloaded(self, _): ...


trainable_model.Optimizer = NoOptimizer
trainable_model.load_weights = lambda *_, **__: None  # weights of any content
trainable_model.check_lockstep = lambda *_: None  # asks the host, not the device
batch_exchange.gather_json = lambda value: [value]  # this rank owns all samples


class Recorded(Exception):
    """Ends a pass after its last micro-batch."""


class Recorder:
    """Runs a schedule's micro-batches, and keeps the devices of all that they gave."""

    def __init__(self, model) -> None:
        self.run = model.schedule.run
        self.devices: set[str] = set()
        model.schedule.run = self
        for chunk in model.chunks:
            chunk.register_forward_hook(lambda _module, _inputs, output: self._keep("output", output))

    def _keep(self, what: str, *values: object) -> None:
        self.devices |= {f"{what} on {value.device}" for value in values if isinstance(value, torch.Tensor)}

    def __call__(self, mini_batch, microbatches, loss, *, forward_only):
        def watched(microbatch, hidden):
            total, kept = loss(microbatch, hidden)
            self._keep("loss", total, *kept.values())
            return total, kept

        with fake_device.Watch():
            self.run(mini_batch, microbatches, watched, forward_only=forward_only)
        raise Recorded


def make_samples(replicas: int) -> list[Sample]:
    random = np.random.default_rng(0)
    found = []
    for i, length in enumerate(LENGTHS * NUM_MICROBATCHES * replicas):
        mask = np.ones(length - 4, dtype=bool)
        mask[1] = False
        tokens = random.integers(2, 99, length)
        logprobs = random.normal(-2.0, 0.3, length - 4).astype(np.float32)
        found.append(Sample(sample_id=f"s{i}", prompt_tokens=4, token_ids=tokens, loss_mask=mask, logprobs=logprobs))
    return found


def answers(model) -> None:
    """Say what the host may read: even shares of the micro-batch's tokens, and the shape that the peer stage sends."""
    grid = model.topology
    ran = sum(length - 1 for length in LENGTHS)  # no sample's last token runs: nothing is predicted from it
    own = ran // grid.context_size // (grid.tensor_size if model.config.parallel.sequence_parallel else 1)

    def even(tensor: torch.Tensor) -> list:
        total, parts = own * model.shape.experts_per_token, tensor.numel()
        shares = [total // parts + (i < total % parts) for i in range(parts)]
        return np.array(shares).reshape(tensor.shape).tolist()

    for dispatcher in (x.token_dispatcher for x in model.chunks[0].modules() if hasattr(x, "token_dispatcher")):
        with unset_fake_temporarily():  # an order of chunks, on the host
            order = torch.arange(model.shape.num_experts).reshape(-1, dispatcher.num_local_experts).T.ravel()
        dispatcher.sort_input_by_local_experts = dispatcher.restore_output_by_local_experts = order
    fake_device.ANSWERS.clear()
    fake_device.ANSWERS["_communicate_shapes"] = lambda _: [own, 1, model.shape.hidden_size]
    if model.shape.num_experts:
        fake_device.ANSWERS |= dict.fromkeys(("maybe_move_tensor_to_cpu", "forward", "sort_chunks_by_idxs"), even)


def one_pass(purpose: str, model, batch: Batch) -> None:
    """Start one pass; it ends in Recorded."""
    facts = batch.facts
    plans = model.plan_pass if purpose in ("logprob", "values") else model.plan_training
    plan = plans(batch, np.ones(facts.num_samples, bool), drops=True)
    (mini_batch,) = plan.mini_batches
    assert len(list(mini_batch.microbatches(model.topology.data_rank))) == NUM_MICROBATCHES
    flat = np.zeros(int(facts.response_offsets[-1]), dtype=np.float32)
    weights = np.ones(facts.num_samples)
    inputs = LossInputs(advantages=weights, weights=weights, old_logprobs=flat, reference_logprobs=flat)
    match purpose:
        case "logprob":
            model.forward(batch, plan)
        case "train" | "supervised":
            model.forward_backward(batch, mini_batch, inputs, fingerprint=b"", supervised=purpose == "supervised")
        case "values":
            model.fetch_rows = lambda *_: batch
            model.values(batch)
        case "critic":
            model.accumulate(batch, mini_batch, flat, flat, b"")


def _spoil(model, mistake: str) -> None:
    """Plant a mistake: the rotary frequencies on the host, or a policy loss that asks the device."""
    true_loss = model.objective.policy

    def asking(microbatch, logprobs, entropy):
        match mistake:
            case "item":
                logprobs.sum().item()
            case "if":
                bool(logprobs.sum() > 0)
            case "mask":
                logprobs[logprobs > 0]
            case "nonzero":
                logprobs.nonzero()
            case "tolist":
                logprobs.tolist()
            case "to the host":
                logprobs.cpu()
            case "to the device":
                torch.zeros(2).to(logprobs.device)
            case "synchronize":
                torch.cuda.synchronize()
        return true_loss(microbatch, logprobs, entropy)

    if mistake == "host tensor":
        for attention in (x for x in model.chunks[0].modules() if isinstance(x, TorchAttention)):
            attention.inv_freq = attention.inv_freq.cpu()
    else:
        model.objective.policy = asking


def run_case(case: Case) -> dict[str, object]:
    """Run a case's passes on a rank of its world; return what ``outcome`` tells of each."""
    fake_device.join_fake_world(case.rank, case.world)
    config = load_config(None, [*DEFAULTS, *case.overrides])
    layers = case.layers or max(LAYERS, config.parallel.pipeline)
    kind = functools.partial(Critic, alone=True) if "values" in case.questions else MegatronBackend
    with fake_device.MODE:
        model = kind(config, hf_config=tiny_config(case.family, layers=layers), weights={})
        model._packing_thread.shutdown()
        model._packing_thread = fake_device.InTurn()
        answers(model)
        if case.mistake is not None:
            _spoil(model, case.mistake)
        samples = make_samples(model.topology.data_size)
        batch = model.gather(samples, [i // 2 for i in range(len(samples))], list(range(len(samples))))
        batch = Batch(facts=batch.facts, local=samples, rows=dict(enumerate(samples)))
        recorder = Recorder(model)
        return {purpose: outcome(purpose, model, batch, recorder) for purpose in case.questions}


def outcome(purpose: str, model, batch: Batch, recorder: Recorder) -> dict[str, object]:
    """Run one pass; tell its error, its questions, the devices of parameters, outputs, losses and gradients.

    kept_bytes: of what autograd keeps for a micro-batch's backward, weights left out.
    launches: kernels a micro-batch; of a backward some are this device's own.
    """
    fake_device.QUESTIONS.clear()
    fake_device.LAUNCHES.clear()
    recorder.devices = {f"parameter on {p.device}" for p in model.parameters()}
    error, weights = None, {storage_of(p) for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}  # alive, so that no other storage takes an address

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(storage_of(tensor), tensor)
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            one_pass(purpose, model, batch)
    except Recorded:
        pass
    except Exception as found:  # noqa: BLE001 (the parent process judges it)
        error = f"{type(found).__name__}: {found}\n{traceback.format_exc()}"
    for parameter in model.parameters():
        if parameter.grad is not None:
            recorder.devices.add(f"gradient on {parameter.grad.device}")
            parameter.grad = None
    kept_bytes = sum(x.untyped_storage().nbytes() for address, x in kept.items() if address not in weights)
    return {"error": error, "questions": dict(fake_device.QUESTIONS), "devices": sorted(recorder.devices),
            "kept_bytes": kept_bytes / NUM_MICROBATCHES, "launches": fake_device.LAUNCHES.total() / NUM_MICROBATCHES}


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # a FakeTensor's has no memory, and an address of 0


if __name__ == "__main__":
    everything = CASES | SPOILED
    for name in sys.argv[2:] or everything:
        told = run_case(everything[name])
        topology.destroy(leave_world=True)
        with open(sys.argv[1], "a") as results:
            results.write(json.dumps([name, told]) + "\n")
