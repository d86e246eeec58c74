"""Whole runs with adaptive group sizes: every layout deals and trains the same, and a checkpoint goes on with them."""

import json
import pathlib
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rl.config import load_config
from megatron_rl.rollout.groups.adaptive_sizes import AdaptiveSizes
from tests.pairwise import quick
from tests.runs.command import SAVED, apart, assert_same_run, few_prompts, firsts_of, rows_of, state_of
from tests.unit.rollout.fake_engine import prompt_of

ADAPTIVE = (
    "rollout.group_sizes=adaptive", "rollout.adaptive_groups.budget=full", "advantage.estimator=rloo",
    "loss.reduction=sequence_sum_norm", "rollout.max_response_tokens=9", "rollout.max_batch_samples=5",
    "reward.functions=[tests.reward_functions:mostly_dead]",
)  # fmt: skip
MORE = {
    "dp2": ("optimizer.distributed=true",),
    "pp2": ("parallel.pipeline=2",),
    "streaming": (
        "rollout.producer.mode=streaming", "rollout.producer.min_groups=3", "rollout.producer.max_staleness_steps=0",
    ),
    "shared": ("plan.max_tokens_per_microbatch=64", "plan.share_prompts=true"),
}  # fmt: skip


def sizes_of(run_dir: pathlib.Path) -> list[dict[str, int]]:
    """Return prompt → number of samples, for each rollout."""
    rows = [json.loads(line) for line in (run_dir / "trace.jsonl").read_text().splitlines()]
    return [dict(zip(row["prompts"], np.bincount(row["group"]).tolist(), strict=True)) for row in rows]


def dealt_again(run_dir: pathlib.Path, *overrides: str) -> list[dict[str, int]]:
    """Return the sizes that a run's own rewards give, one rollout after another."""
    dealer, found = AdaptiveSizes(load_config(None, [*ADAPTIVE, *overrides]).rollout), []
    for line in (run_dir / "trace.jsonl").read_text().splitlines():
        row = json.loads(line)
        prompts = {place: prompt_of(0) for place in range(len(row["prompts"]))}
        for place, name in enumerate(row["prompts"]):
            number, _, epoch = name.partition("@")
            prompts[place] = prompt_of(int(number), epoch=int(epoch))
        found.append({row["prompts"][place]: size for place, size in dealer.deal(prompts).items()})
        groups, rewards = np.array(row["group"]), np.array(row["reward"], dtype=np.float64)
        scored = SimpleNamespace(
            facts=SimpleNamespace(groups=groups),
            rewards=SimpleNamespace(totals=rewards, included=np.ones(len(groups), dtype=bool)),
        )
        dealer.note(prompts, scored)
    return found


def test_groups_are_dealt_by_the_rewards_of_earlier_epochs(made, arithmetic, tmp_path):
    """16 prompts in 2 epochs: 32 samples a rollout; from the second epoch on the dead two thirds get fewer."""
    run = made(1, few_prompts(arithmetic, tmp_path, 16), *ADAPTIVE, "train.num_rollouts=4")
    found = sizes_of(run)
    assert found == dealt_again(run, "rollout.samples_per_prompt=4")
    assert [sum(sizes.values()) for sizes in found] == [32] * 4 and set(found[0].values()) == {4}
    assert min(found[3].values()) < 4 < max(found[3].values()) <= 16
    assert all(len(rows) == 2 for rows in [[x for x in rows_of(run) if x["rollout"] == k] for k in range(1, 5)])
    last = firsts_of(run, "groups/samples_mean")[-1]
    assert (last["groups/samples_mean"], last["groups/known"]) == (4.0, 8.0)
    assert (last["groups/samples_min"], last["groups/samples_max"]) == (min(found[3].values()), max(found[3].values()))


@pytest.mark.parametrize("layout", quick(MORE, "dp2", "streaming"))
def test_every_layout_and_mode_deals_and_trains_as_one_rank(made, arithmetic, tmp_path, layout):
    """Rewards are of lengths alone, so that rounding changes no deal; weights agree as those of equal groups do."""
    data, world = few_prompts(arithmetic, tmp_path, 16), 2 if layout in ("dp2", "pp2") else 1
    alone = made(1, data, *ADAPTIVE, "train.num_rollouts=4")
    other = made(world, data, *ADAPTIVE, *MORE[layout], "train.num_rollouts=4")
    assert sizes_of(other) == sizes_of(alone) and apart(alone, other) < 1e-5


def test_sizes_go_on_from_a_checkpoint(made, arithmetic, tmp_path):
    """With a rollout ahead: its sizes were dealt before the checkpoint, and the memory lacks it."""
    data = few_prompts(arithmetic, tmp_path, 16)
    given = (
        data,
        *ADAPTIVE,
        *SAVED,
        "rollout.producer.mode=prefetch",
        "train.num_rollouts=4",
        "replay.capacity_groups=4",
    )
    whole = made(1, *given)
    part = made.again(whole, 2)
    assert len(state_of(part, 2)["feed"]["sizes"]["rows"]) == 16
    assert state_of(part, 4)["feed"] == state_of(whole, 4)["feed"]
    assert_same_run(whole, part)
    assert len({size for sizes in sizes_of(part) for size in sizes.values()}) > 1


def test_fewer_samples_are_dealt_for_the_same_variance(made, arithmetic, tmp_path):
    """The number of optimizer steps stays; samples become fewer once prompts are known."""
    given = (*ADAPTIVE, "rollout.adaptive_groups.budget=same_variance", "train.num_rollouts=4")
    run = made(1, few_prompts(arithmetic, tmp_path, 16), *given)
    totals = [sum(sizes.values()) for sizes in sizes_of(run)]
    assert totals[:1] == [32] and totals[3] < 30 and len(rows_of(run)) == 8
