"""Every policy term over two epochs of one rollout, through train.py's loop, gives the weights of a plain loop."""

from types import SimpleNamespace

import torch

from megatron_rl.config import POLICIES, Config
from tests.equality.given_run import fresh_run, train_once
from tests.equality.given_samples import (
    ADVANTAGES,
    BOUND,
    FAMILY,
    GROUPS,
    PER_MINI_BATCH,
    SETTINGS,
    TERMS,
    drawn,
    plain_steps,
)
from tests.equality.rig import config_of, open_rig
from tests.reference import reference_logprobs, relative_error
from tests.unit.algorithm.naive_policy import token_loss
from tests.unit.algorithm.naive_steps import naive_steps

TWICE = (*SETTINGS, "train.epochs_per_rollout=2")
CLIPPED = {"ppo", "ppo, dual clip", "ppo, KL and entropy", "gspo", "cispo"}


def sample_loss(model, config, sample, old, weight, advantage):
    """Return the loss of semantics §7 over one sample's loss tokens, whose reference policy is the first one."""
    chosen = torch.from_numpy(sample.loss_mask)
    logprobs, entropy = (x[chosen] for x in reference_logprobs(model, sample))
    before, count = old[chosen], int(chosen.sum())
    tokens = SimpleNamespace(
        old_logprobs=torch.from_numpy(sample.logprobs)[chosen] if config.policy == "dro" else before,
        advantages=torch.full((count,), weight * advantage),
        weights=torch.full((count,), weight),
        sequences=torch.zeros(count, dtype=torch.int64),
    )
    each = list(logprobs)
    loss = 0.0 * logprobs.sum()  # where every token is clipped nothing else has a gradient
    for t in range(count):
        gap = before[t] - each[t]
        unbiased = (each[t] - before[t]).exp() * (gap.exp() - gap - 1)
        loss = loss + token_loss(config, tokens, each, t) + weight * config.kl_coefficient * unbiased
        loss = loss - weight * config.entropy_coefficient * entropy[t]
    return loss


def plain_loop(config: Config) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return (weights after two epochs, norms before clipping), by torch's AdamW; old log-probs stay the first ones."""
    model, samples = drawn()
    with torch.no_grad():
        old = [reference_logprobs(model, s)[0] for s in samples]
    given = ([s.loss_mask for s in samples], GROUPS, ADVANTAGES.tolist(), PER_MINI_BATCH)
    steps = [*naive_steps(*given, reduction="token_mean", denominator="original", steps="match")]

    def add_gradient(step: tuple) -> None:
        live, weights = step
        for i in live:
            sample_loss(model, config.loss, samples[i], old[i], weights[i], float(ADVANTAGES[i])).backward()

    return plain_steps(steps * 2, add_gradient)


def every_term(rank: int, world: int) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = {}
    with open_rig(FAMILY, *TWICE) as rig:
        rig.take(drawn()[1], GROUPS)
        passed, take = [], rig.backend.logprobs
        rig.backend.logprobs = lambda batch, chosen: passed.append(chosen) or take(batch, chosen)
        for name in TERMS:
            passed.clear()
            run = train_once(fresh_run(rig, ADVANTAGES, *TWICE, *TERMS[name]))
            weights, results = rig.weights(), run.results
            if rig.is_main:
                wanted, norms = plain_loop(config_of(*TWICE, *TERMS[name]))
                found[name] = {
                    "kinds": "".join(result.kind.value[0] for result in results),
                    "passes": (run.num_passes, len(passed)),
                    "weights": relative_error(weights, {key: wanted[key] for key in weights}),
                    "norm": max(abs(r.grad_norm - n) / max(n, 1e-9) for r, n in zip(results, norms, strict=True)),
                    "clipped": [result.sums["clipped"] for result in results],
                    "on policy": abs(results[0].sums["ratio"] - results[0].sums["tokens"]),
                }
    return found


def test_two_epochs_of_every_policy_term_equal_the_plain_loop(pool):
    found = pool.run(2, every_term, timeout_s=90)[0]
    assert list(found) == list(TERMS)
    for name, cell in found.items():
        assert cell["kinds"] == "RGRR" * 2, (name, cell)  # a ghost in each epoch
        # one for π_old, one for the reference; none per epoch
        assert cell["passes"] == (1, 2 if "KL" in name else 1), (name, cell)
        assert cell["weights"] < BOUND, (name, cell)
        assert cell["norm"] < 1e-4, (name, cell)  # at weights that AdamW has already moved by rounding
        assert cell["clipped"][0] == 0 and any(cell["clipped"][4:]) == (name in CLIPPED), (name, cell)
        assert name == "dro" or cell["on policy"] < 1e-4, (name, cell)  # dro's ratio is to the engine's policy


def test_every_policy_has_a_term_here():
    assert {config_of(*TWICE, *TERMS[name]).loss.policy for name in TERMS} == set(POLICIES)
