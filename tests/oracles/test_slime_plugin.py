"""The conversion for slime and miles against their own sources: tests/oracles/slime_rig.py says where those are."""

from collections.abc import Iterator

import pytest
import torch

from megatron_rl.distributed import topology
from megatron_rl.errors import ConfigError
from megatron_rl.integrations import slime as plugin
from tests.equality.layouts import TOLERANCE
from tests.oracles import slime_rig as rig
from tests.workers.nursery import Nursery
from tests.workers.pool import Pool

MIXED = [[1.0, 0.0, 0.0, 1.0], [1.0] * 4, [0.0] * 4, [0.0, 0.5, 1.0, 0.5]]  # two dead groups, and two samples at a mean
DEAD = [[1.0] * 4, [0.0] * 4]
REWARDS = {"mixed": MIXED, "dead": DEAD, "alive": [[1.0, 0.0, 0.0, 0.0]] * 2}
PER_TOKEN = (False, True)
METHODS = (
    {}, {"grpo_std_normalization": False, "eps_clip_c": 3.0}, {"rewards_normalization": False},
    {"advantage_estimator": "gspo"}, {"advantage_estimator": "cispo", "balance_data": False},
    {"use_tis": True, "use_rollout_logprobs": False}, {"use_opsm": True}, {"use_dynamic_batch_size": False},
    {"global_batch_size": 4},
)  # fmt: skip


@pytest.fixture(scope="module", params=sorted(rig.FOLDERS))
def package(request: pytest.FixtureRequest) -> str:
    if why := rig.missing(request.param):
        pytest.skip(why)
    return request.param


@pytest.fixture(scope="module")
def own_pool(nursery: Nursery) -> Iterator[Pool]:
    """Start workers for this file alone: importing slime's Megatron side patches Megatron-Core."""
    if why := rig.missing("slime"):
        pytest.skip(why)
    with Pool(nursery=nursery) as workers:
        yield workers


@pytest.mark.parametrize("per_token", PER_TOKEN)
@pytest.mark.parametrize("rewards", REWARDS.values(), ids=REWARDS)
def test_kept_samples_have_the_trainers_own_fields(package: str, rewards: list, per_token: bool) -> None:
    """Every field of a sample with an advantage is what their own conversion gives; the others are stubs."""
    own, given = rig.conversions(package, rewards, calculate_per_token_loss=per_token)
    assert own.keys() == given.keys()
    dead = [row for row, reward in enumerate(own["rewards"]) if reward == 0 or not sum(own["loss_masks"][row])]
    for name, values in own.items():
        assert len(values) == len(given[name])
        for row, value in enumerate(values):
            if row not in dead or name in plugin.KEPT_FIELDS:
                assert given[name][row] == value, (name, row)
    assert [len(given["tokens"][row]) for row in dead] == [2] * len(dead)


@pytest.mark.parametrize("changes", [{}, {"use_kl_loss": True, "kl_loss_coef": 0.1}, {"use_opd": True}], ids=str)
def test_refused_settings_get_the_trainers_own_data(package: str, changes: dict) -> None:
    own, given = rig.conversions(package, MIXED, **changes)
    assert (own == given) == bool(changes)


@pytest.mark.parametrize("setting", ["use_dynamic_global_batch_size", "multi_lora"])
def test_what_miles_keeps_from_a_conversion_is_an_error(setting: str) -> None:
    if why := rig.missing("miles"):
        pytest.skip(why)
    with pytest.raises(ConfigError, match=f"{setting}=True"):
        rig.conversions("miles", MIXED, **{setting: True})


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("rollouts", [4, 8])
@pytest.mark.parametrize("rewards", REWARDS.values(), ids=REWARDS)
def test_schedule_loses_no_sample(package: str, rewards: list, rollouts: int, dynamic: bool, chunks: int) -> None:
    """Their planner cuts the same steps of the same samples, as many micro-batches on each rank, never more."""
    settings = dict(global_batch_size=rollouts, use_dynamic_batch_size=dynamic, micro_batch_size=1)
    whole, cut = rig.conversions(package, rewards, **settings)
    args, found = rig.arguments(rewards, **settings), []
    for data in (whole, cut):
        partitions, micro_batches, counts, denominators = rig.schedule(package, data, args, chunks=chunks)
        assert sorted(sum(partitions, [])) == list(range(len(data["tokens"])))
        starts, steps = [0] * len(partitions), []
        for number in counts:
            members = []
            for rank, rows in enumerate(partitions):
                part = micro_batches[rank][starts[rank] : starts[rank] + number]
                assert len(part) == number and all(part)
                members += [rows[place] for micro_batch in part for place in micro_batch]
                starts[rank] += number
            steps.append(sorted(members))
        assert starts == [len(part) for part in micro_batches]
        found.append((steps, denominators, counts))
    (steps, denominators, dense), (same_steps, same, counts) = found
    assert steps == same_steps and denominators == same
    assert all(few <= many for few, many in zip(counts, dense, strict=True))
    if dynamic and chunks == 1 and rewards is not REWARDS["alive"]:
        assert sum(counts) < sum(dense)


def compare(rank: int, world: int) -> list[tuple]:
    """Return each method's largest differences, sizes of gradients and tokens, with and without stubs, step by step."""
    assert not rig.missing("slime")
    topology.initialize()
    found = []
    with torch.compiler.set_stance("force_eager"):
        for name, rewards in REWARDS.items():
            for method in METHODS:
                for per_token in PER_TOKEN:
                    changes = method | {"calculate_per_token_loss": per_token}
                    args = rig.arguments(rewards, **changes)
                    own, given = rig.conversions("slime", rewards, **changes)
                    wanted, got = rig.gradients(own, args), rig.gradients(given, args)
                    assert len(wanted) == len(got) == len(own["tokens"]) // args.global_batch_size
                    size = max(float(step.abs().max()) for step in wanted)
                    difference = max(float((a - b).abs().max()) for a, b in zip(wanted, got, strict=True))
                    tokens = [sum(map(len, data["tokens"])) for data in (own, given)]
                    found.append((name, changes, difference, size, tokens))
    return found


def test_gradient_equals_slimes_own(own_pool: Pool) -> None:
    """Slime's schedule, advantages, policy losses and reducer give the same gradient of every step with stubs."""
    (results,) = own_pool.run(1, compare, timeout_s=120)
    assert len(results) == len(REWARDS) * len(METHODS) * len(PER_TOKEN)
    for name, changes, difference, size, (dense, executed) in results:
        assert difference <= TOLERANCE * max(size, 1e-3), (name, changes)
        if changes.get("rewards_normalization", True):
            assert (size == 0) == (name == "dead"), (name, changes)
        if name == "mixed":
            assert executed < 0.8 * dense
