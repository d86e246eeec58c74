"""Opens a policy and its critic on the grids of ranks of the critic tests, beside a Hugging Face reward model."""

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from megatron_rl.backend import MegatronBackend
from megatron_rl.backend.batch import Batch
from megatron_rl.config import load_config
from megatron_rl.critic import Critic
from megatron_rl.distributed import topology
from megatron_rl.distributed.collectives import reduce_on_host
from megatron_rl.types import Sample
from tests.equality.rig import DEFAULTS, MAX_RESPONSE_TOKENS
from tests.equality.shared_samples import SHARED, group_samples
from tests.reference import (
    LAYERS,
    away_from_neutral,
    file_weights,
    gradient_of,
    make_samples,
    near_policy,
    tiny_config,
    tiny_model,
    token_weight,
)

CLIP = 0.2
NUM_SAMPLES = 7
VPP = "critic.parallel.virtual_pipeline=2"


def reward_model(family: str, layers: int):
    """Return (config, model) of a Hugging Face sequence classifier of one label; ``score`` gives a value per token."""
    from transformers import AutoModelForSequenceClassification

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = tiny_config(family, layers=layers)
        config.num_labels = 1
        model = AutoModelForSequenceClassification.from_config(config).float().eval()
        away_from_neutral(model)
    return config, model


def values_of(model, sample: Sample) -> torch.Tensor:
    """Return the values, [response], of the states before each response token."""
    hidden = model.model(torch.from_numpy(sample.token_ids)[None]).last_hidden_state[0]
    return model.score(hidden)[sample.prompt_tokens - 1 : -1, 0]


def targets(samples: list[Sample]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return (returns, old values) per sample; some values are clipped towards their return, some away from it."""
    random = np.random.default_rng(5)
    returns = [random.normal(0.0, 1.0, len(s.loss_mask)).astype(np.float32) for s in samples]
    return returns, [random.normal(0.0, 1.0, len(s.loss_mask)).astype(np.float32) for s in samples]


def naive(model, samples: list[Sample], groups: list[int], reduction: str) -> tuple[dict[str, torch.Tensor], float]:
    """Compute gradient and loss by a loop over loss tokens, in the words of semantics §8."""
    model.zero_grad()
    returns, old = targets(samples)
    total = 0.0
    trained = [i for i, sample in enumerate(samples) if sample.loss_mask.any()]  # the others stand in no denominator
    counted = [samples[i] for i in trained], [groups[i] for i in trained]
    for number, i in enumerate(trained):
        sample, weight = samples[i], token_weight(reduction, *counted, number, MAX_RESPONSE_TOKENS)
        values = values_of(model, sample)
        for t in np.flatnonzero(sample.loss_mask):
            bounded = values[t].clamp(float(old[i][t]) - CLIP, float(old[i][t]) + CLIP)
            error = torch.maximum((values[t] - float(returns[i][t])) ** 2, (bounded - float(returns[i][t])) ** 2)
            loss = 0.5 * weight * error
            loss.backward(retain_graph=True)
            total += loss.item()
    return gradient_of(model), total


@dataclass(kw_only=True)
class Pair:
    """A policy and its critic on this rank, the Hugging Face models of both, and the batch."""

    backend: MegatronBackend
    critic: Critic
    policy_model: torch.nn.Module
    judge: torch.nn.Module
    samples: list[Sample]
    groups: list[int]
    batch: Batch


@contextlib.contextmanager
def open_critic(family: str, *overrides: str) -> Iterator[Pair]:
    """Open a policy, a critic beside it and a batch, of shared_samples.py under ``plan.share_prompts=true``."""
    layers = 4 if VPP in overrides else LAYERS
    hf_config, model = tiny_model(family, layers=layers)
    critic_hf, judge = reward_model(family, layers)
    config = load_config(
        None, [*DEFAULTS, "advantage.estimator=gae", f"critic.value_clip={CLIP}", "critic.lr=1e-3", *overrides]
    )
    with contextlib.ExitStack() as held:
        held.callback(topology.destroy)
        backend = MegatronBackend(config, hf_config=hf_config, weights=file_weights(model))
        critic = Critic(config, hf_config=critic_hf, weights=dict(judge.state_dict()))
        samples, groups = make_samples(NUM_SAMPLES), [i // 2 for i in range(NUM_SAMPLES)]
        if SHARED in overrides:
            samples, groups = group_samples()
        samples = near_policy(model, samples)
        empty = samples[3]
        samples[3] = dataclasses.replace(empty, loss_mask=np.zeros_like(empty.loss_mask))  # excluded: it trains nothing
        mine = range(backend.topology.rank, len(samples), backend.topology.world_size)
        batch = backend.gather([samples[i] for i in mine], [groups[i] for i in mine], list(mine))
        yield Pair(backend=backend, critic=critic, policy_model=model, judge=judge, samples=samples, groups=groups,
                   batch=batch)
        critic.close()
        held.pop_all()
        backend.close(leave_world=False)


def one_gradient(critic: Critic, batch, returns: np.ndarray, old: np.ndarray) -> tuple[dict[str, torch.Tensor], float]:
    """Return the gradient of the whole batch as one mini-batch, by the critic's own parts."""
    own = dataclasses.replace(batch, rows={})
    plan = critic.plan_training(own, own.facts.loss_tokens > 0, drops=True)
    own = critic.fetch_rows(own, plan)
    (mini_batch,) = plan.mini_batches
    critic.accumulate(own, mini_batch, returns, old, plan.fingerprints()[0])
    sums = reduce_on_host(critic._sums.values.clone())
    gradient = critic.gradient()
    critic.zero_grad()
    return gradient, float(sums[0])
