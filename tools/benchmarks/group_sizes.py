"""Computes how many samples adaptive group sizes save at equal gradient variance, for pass rates of a given law.

    python tools/benchmarks/group_sizes.py --law 0.1 --samples 8 --prompts 64 --rollouts 32 --epochs 4

Prompts have pass rates drawn from Beta(a, a). Between epochs each moves by a normal step in logit. The dealer of a run
(`rollout/groups/adaptive_sizes.py`) sees the rewards that are drawn, and deals the next epoch. The gradient's variance
of a group is p (1 - p) / (n - 1), by the true pass rate p. `saved` is the number of samples that equal groups would
need for the variance that was reached, over those that were dealt; the first epoch, in which nothing is known, is left
out. `known` is the same with the true variances in place of the dealer's estimates. No clock is read.
"""

from __future__ import annotations

import argparse
import json
import sys
from types import SimpleNamespace

import numpy as np

from megatron_rl.config import load_config
from megatron_rl.rollout.groups.adaptive_sizes import AdaptiveSizes, dealt
from megatron_rl.types import Prompt


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python tools/benchmarks/group_sizes.py --law 0.3 --samples 16 --budget full",
    )
    parser.add_argument("--law", type=float, default=0.1, metavar="A", help="pass rates are drawn from Beta(A, A)")
    parser.add_argument("--samples", type=int, default=8, help="rollout.samples_per_prompt")
    parser.add_argument("--prompts", type=int, default=64, help="train.prompts_per_rollout")
    parser.add_argument("--rollouts", type=int, default=32, help="rollouts of an epoch")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--drift", type=float, default=0.5, help="standard deviation of a step in logit")
    parser.add_argument("--budget", default="same_variance", help="rollout.adaptive_groups.budget")
    parser.add_argument("--discount", type=float, default=0.5, help="rollout.adaptive_groups.memory_discount")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    if min(given.samples - 1, given.prompts, given.rollouts, given.epochs - 1) < 1:
        parser.error("--samples and --epochs must be at least 2, --prompts and --rollouts at least 1")
    return given


def scored(sizes: dict[int, int], rates: np.ndarray, random: np.random.Generator) -> SimpleNamespace:
    """Draw the rewards of groups of these sizes; return them as the dealer reads them."""
    groups = np.repeat(list(sizes), list(sizes.values()))
    totals = (random.random(len(groups)) < rates[groups]).astype(np.float64)
    rewards = SimpleNamespace(totals=totals, included=np.ones(len(groups), dtype=bool))
    return SimpleNamespace(facts=SimpleNamespace(groups=groups), rewards=rewards)


def factor(variances: np.ndarray, sizes: np.ndarray) -> float:
    """Return the samples that equal groups would need for the variance that these sizes reach, over these sizes."""
    reached = float((variances / (sizes - 1)).sum())
    return len(sizes) * (1 + float(variances.sum()) / reached) / float(sizes.sum())


def simulated(given: argparse.Namespace) -> dict[str, float]:
    """Return the figures of one law of pass rates."""
    random = np.random.Generator(np.random.Philox(key=given.seed))
    settings = load_config(
        None,
        [
            *(f"rollout.samples_per_prompt={given.samples}", "rollout.group_sizes=adaptive"),
            f"rollout.adaptive_groups.budget={given.budget}",
            f"rollout.adaptive_groups.memory_discount={given.discount}",
        ],
    ).rollout
    dealer, found, known, dead = AdaptiveSizes(settings), [], [], []
    rates = random.beta(given.law, given.law, size=(given.rollouts, given.prompts)).clip(1e-9, 1 - 1e-9)
    for epoch in range(given.epochs):
        for number, own in enumerate(rates):
            prompts = {
                place: Prompt(prompt_id=f"{number}/{place}@{epoch}", text="", token_ids=(0,), columns={})
                for place in range(given.prompts)
            }
            sizes, variances = dealer.deal(prompts), own * (1 - own)
            if epoch:
                found.append((factor(variances, np.array(list(sizes.values()))), sum(sizes.values())))
                best = dealt(
                    variances.tolist(), given.samples, 2, settings.largest_group, spends_all=given.budget == "full"
                )
                known.append(factor(variances, np.array(best)))
            dead.append((own**given.samples + (1 - own) ** given.samples).mean())
            dealer.note(prompts, scored(sizes, own, random))
        logits = np.log(rates / (1 - rates)) + given.drift * random.standard_normal(rates.shape)
        rates = (1 / (1 + np.exp(-logits))).clip(1e-9, 1 - 1e-9)
    return {
        "dead_share": float(np.mean(dead)),
        "samples_mean": float(np.mean([total for _, total in found])) / given.prompts,
        "saved": float(np.mean([value for value, _ in found])),
        "known": float(np.mean(known)),
    }


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    print(json.dumps({**vars(given), **simulated(given)}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
