"""A mixture trained with given experts (forced_experts.py) has the gradient of a plain loop that is forced to them."""

import dataclasses

import numpy as np
import pytest
import torch

from megatron_rl.errors import ConfigError
from megatron_rl.observability.metrics import step_metrics
from megatron_rl.types import Sample
from megatron_rl.weights.export import load_weights
from megatron_rl.weights.reader import MemoryReader
from tests.equality.forced_experts import NUM_SAMPLES, TOP_K, draw_experts, forced, given, hooked, plain_loop, wanted
from tests.equality.given_run import fresh_run, train_once
from tests.equality.layouts import TOLERANCE
from tests.equality.rig import config_of, layers_of, open_rig, ragged_advantages
from tests.equality.rows import assert_close, measured
from tests.equality.shared_samples import advantages_of, group_samples
from tests.pairwise import quick
from tests.reference import (
    file_weights,
    make_samples,
    masked_logprobs,
    near_policy,
    reference_logprobs,
    relative_error,
    tiny_model,
)

from megatron.core.transformer.moe.router import TopKRouter  # isort: skip
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction  # isort: skip

REPLAY = "rollout.routing_replay=rollout"
LAYOUTS = (
    *("one qwen3_moe", "one qwen3_moe_unnormalised", "one mixtral", "recompute qwen3_moe", "DP2 qwen3_moe"),
    *("EP2 qwen3_moe", "TP2-SP mixtral", "TP2-SP-EP2-ETP1 qwen3_moe", "PP2 qwen3_moe", "PP2-recompute qwen3_moe"),
    *("PP2-VPP2-recompute qwen3_moe", "CP2 qwen3_moe", "CP2-EP2 mixtral", "selective qwen3_moe"),
)
QUICK = (
    *("TP2-SP mixtral", "PP2-recompute qwen3_moe", "CP2-EP2 mixtral", "selective qwen3_moe"),
)
RECORDED = ("EP2 qwen3_moe", "TP2-SP qwen3_moe", "CP2 qwen3_moe", "PP2-VPP2-recompute qwen3_moe", "one qwen3_moe")


def replayed(rank: int, world: int, family: str, overrides: tuple[str, ...]) -> dict[str, float]:
    advantages, found = ragged_advantages(NUM_SAMPLES), {}
    with open_rig(family, *overrides, REPLAY) as rig:
        layers = rig.model.config.num_hidden_layers
        logprobs, gradient = wanted(family, layers)
        rig.take(list(given(family, layers)))
        for cut in (dict(max_tokens=25), dict(samples_per_microbatch=1)):
            rig.rules(**cut)
            found[f"log-probs {cut}"] = float(np.abs(rig.logprobs() - logprobs).max())
            found |= rig.errors(advantages, gradient, f" {cut}")
    return found


@pytest.mark.parametrize("name", quick(LAYOUTS, *QUICK))
def test_replayed_experts_equal_the_plain_loop_with_experts_forced(pool, name):
    assert_close(pool, name, replayed)


def shared(rank: int, world: int, family: str, overrides: tuple[str, ...]) -> dict[str, float]:
    """Return the errors where samples of one group have one prompt with the same experts, which runs once."""
    _, model = tiny_model(family)
    samples, groups = group_samples()
    drawn, firsts = draw_experts(samples, 2), {}
    for i, (sample, group) in enumerate(zip(drawn, groups, strict=True)):
        first = firsts.setdefault(group, sample)
        sample.routed_experts[: sample.prompt_tokens] = first.routed_experts[: sample.prompt_tokens]
        with forced(model, sample):
            drawn[i] = near_policy(model, [sample], seed=i)[0]
    advantages, found = advantages_of(len(drawn)), {}
    logprobs, gradient = plain_loop(model, drawn, advantages)
    with open_rig(family, *overrides, REPLAY, "plan.share_prompts=true") as rig:
        rig.take(drawn, groups)
        for cut in (dict(max_tokens=10_000), dict(max_tokens=30)):
            rig.rules(**cut)
            found[f"log-probs {cut}"] = float(np.abs(rig.logprobs() - logprobs).max())
            plan = rig.plan(advantages, drops=True)
            found[f"gradient {cut}"] = relative_error(rig.gradient(advantages, plan), gradient)
    return found


@pytest.mark.parametrize("name", quick(["one qwen3_moe", "TP2-SP qwen3_moe", "CP2 qwen3_moe"], "TP2-SP qwen3_moe"))
def test_a_shared_prompt_is_replayed_once(pool, name):
    assert_close(pool, name, shared)


def own_experts(model, sample: Sample) -> np.ndarray:
    """Return int16 [tokens, layers, top_k], ascending: where transformers sends each token."""
    found: list[np.ndarray] = []

    def note(module, args, output) -> None:
        found.append(output[0].topk(TOP_K, dim=-1).indices.numpy())

    with torch.no_grad(), hooked(model, lambda layer: note):
        reference_logprobs(model, sample)
    return np.sort(np.stack(found, axis=1).astype(np.int16), axis=2)


def recorded(rank: int, world: int, family: str, overrides: tuple[str, ...]) -> dict[str, object]:
    """Return what a pass recorded that is not transformers' choice, and the gradient's error at moved weights."""
    _, model = tiny_model(family, layers=layers_of(config_of(*overrides)))
    samples, advantages = list(near_policy(model, make_samples(NUM_SAMPLES))), ragged_advantages(NUM_SAMPLES)
    read = [int(np.flatnonzero(s.loss_mask)[-1]) + s.prompt_tokens for s in samples]
    known = []
    for sample, tokens in zip(samples, read, strict=True):
        experts = own_experts(model, sample)
        experts[tokens:] = -1
        known.append(dataclasses.replace(sample, routed_experts=experts))
    torch.manual_seed(3)
    noise = [0.05 * torch.randn_like(p) for p in model.parameters()]
    with open_rig(family, *overrides, "rollout.routing_replay=old_logprobs") as rig:
        rig.take(samples)
        passed = rig.backend.logprobs(rig.batch, rig.everyone)
        (experts,) = passed.recorded
        rig.batch = experts.given_to(rig.batch)
        known_of, wrong = {s.sample_id: s.routed_experts for s in known}, []
        for sample in rig.batch.local:
            if not np.array_equal(np.sort(sample.routed_experts, axis=2), known_of[sample.sample_id]):
                wrong.append(sample.sample_id)
        with torch.no_grad():
            for parameter, more in zip(model.parameters(), noise, strict=True):
                parameter.add_(more)
        backend, chunks = rig.backend, [c.module for c in rig.backend.chunks]
        load_weights(chunks, backend.shape, backend.topology, MemoryReader(file_weights(model)))
        moved = sum(int((own_experts(model, s)[:n] != s.routed_experts[:n]).sum())
                    for s, n in zip(known, read, strict=True))
        _, gradient = plain_loop(model, known, advantages)
        error = relative_error(rig.gradient(advantages, rig.plan(advantages, drops=True)), gradient)
    return {"wrong": wrong, "moved": moved, "error": error}


@pytest.mark.parametrize("name", quick(RECORDED, *RECORDED[:4]))
def test_the_old_policys_own_experts_are_replayed(pool, name):
    """The experts of the old log-probs' pass are transformers' own, and the update keeps them at moved weights."""
    for found in measured(pool, name, recorded):
        assert not found["wrong"] and found["moved"] > 20 and found["error"] < TOLERANCE, found


def beside_router_replay(rank: int, world: int, family: str) -> list[tuple[torch.Tensor, ...]]:
    """Compare our seam with RouterReplay: two micro-batches forward, recomputed, and with the router's own choice."""
    random = torch.Generator().manual_seed(7)
    with open_rig(family, REPLAY) as rig:
        (experts_part,), (chunk,) = rig.backend.parts, rig.backend.chunks
        routing = experts_part.routing
        router = next(x for x in chunk.modules() if isinstance(x, TopKRouter))
        num_experts, width = router.weight.shape
        inputs = [torch.randn(rows, 1, width, generator=random, requires_grad=True) for rows in (23, 9)]
        experts = [torch.rand(len(x), num_experts, generator=random).argsort(1)[:, : router.topk] for x in inputs]
        weights = [torch.randn(len(x), num_experts, generator=random) for x in inputs]

        def run(number: int) -> tuple[torch.Tensor, ...]:
            probs, chosen = router(inputs[number])
            loss = (probs.view_as(weights[number]) * weights[number]).sum()
            return probs.detach(), chosen, *torch.autograd.grad(loss, [router.weight, inputs[number]])

        ours, theirs = [], []
        for number, places in enumerate(experts):
            replays = places.short().expand(len(routing.layers), -1, -1)
            with routing.forward(0, inputs[number], replays, counts=False):
                ours += run(number)
        ours += [*run(0), *run(1)]  # outside of a forward pass: recomputation
        with routing.recording() as record, routing.forward(0, inputs[0], None, counts=False):
            ours += run(0)
        ours.append(record[id(inputs[0])][1][0])
        router.router_replay = replay = RouterReplay()
        replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        for number, places in enumerate(experts):
            replay.set_target_indices(places)
            theirs += run(number)
        replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        theirs += [*run(0), *run(1)]
        replay.set_router_replay_action(RouterReplayAction.RECORD)
        theirs += [*run(0), replay.get_recorded_indices()]
        RouterReplay.clear_global_router_replay_instances()
    assert not torch.equal(ours[1], ours[-4])  # the given experts are not the router's own
    return list(zip(ours, theirs, strict=True))


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_moe_unnormalised", "mixtral", "glm4_moe"])
def test_a_router_gives_what_it_gives_under_megatron_cores_router_replay(pool, family):
    """Forward, recomputation and recording are those of RouterReplay, to the bit, in every release that has it."""
    (found,) = pool.run(1, beside_router_replay, family, timeout_s=60)
    assert len(found) == 5 * 4 + 1 and all(torch.equal(one, other) for one, other in found)


def share_of(rank: int, world: int, family: str, overrides: tuple[str, ...]) -> tuple[float, float]:
    """Return the share of tokens that a step's routers would have sent elsewhere, and that of the plain loop."""
    _, model = tiny_model(family)
    samples, advantages = given(family, 2), ragged_advantages(NUM_SAMPLES)
    elsewhere = total = 0
    for sample in samples:
        tokens = int(np.flatnonzero(sample.loss_mask)[-1]) + sample.prompt_tokens
        routed = np.sort(sample.routed_experts, axis=2)[:tokens]
        with forced(model, sample):
            differs = (own_experts(model, sample)[:tokens] != routed).any(axis=2)
        known = routed[..., 0] >= 0
        elsewhere, total = elsewhere + int((differs & known).sum()), total + int(known.sum())
    with open_rig(family, *overrides, REPLAY) as rig:
        rig.take(list(samples))
        rig.logprobs()  # is not counted
        (result,) = rig.step(advantages, drops=False)
        return step_metrics(result)["train/rerouted_token_share"], elsewhere / total


@pytest.mark.parametrize("name", ["recompute qwen3_moe", "TP2-SP qwen3_moe", "PP2 qwen3_moe"])
def test_the_rerouted_share_is_counted_once_per_token_and_layer(pool, name):
    for found, expected in measured(pool, name, share_of):
        assert found == pytest.approx(expected, abs=1e-12) and found > 0.5, (found, expected)


def one_reads_the_reference(rank: int, world: int) -> tuple[float, float]:
    """Return the gaps of the reference's log-probs, on both placements, to those of the routers' own choice."""
    gaps = []
    _, model = tiny_model("qwen3_moe")
    samples = given("qwen3_moe", 2)
    own = masked_logprobs(model, samples)
    for placement in ("host", "device"):
        with open_rig("qwen3_moe", REPLAY, f"reference.placement={placement}") as rig:
            rig.take(list(samples))
            rig.backend.keep_reference()
            with rig.backend.reference_weights():
                gaps.append(float(np.abs(rig.logprobs() - own).max()))
    return tuple(gaps)


def test_the_reference_chooses_its_own_experts(pool):
    for gaps in pool.run(1, one_reads_the_reference, timeout_s=60):
        assert max(gaps) < TOLERANCE, gaps


def with_faulty_experts(rank: int, world: int) -> dict[str, str]:
    """Return the words about samples that have no experts, of other layers, twice one, beyond the last, or half."""
    samples, said = list(given("qwen3_moe", 2)), {}
    drawn = samples[3].routed_experts
    token = int(np.flatnonzero(drawn[:, 0, 0] >= 0)[0])
    pairs = {"twice": (2, 2), "beyond": (0, 4), "half": (0, -1)}
    with open_rig("qwen3_moe", REPLAY) as rig:
        for kind in ("missing", "other layers", *pairs):
            faulty = drawn.copy() if kind in pairs else drawn[:, :1] if kind == "other layers" else None
            if kind in pairs:
                faulty[token, 1] = pairs[kind]
            samples[3] = dataclasses.replace(samples[3], routed_experts=faulty)
            with pytest.raises(ValueError, match="sample s3") as raised:
                rig.take(samples)
                rig.backend.check_samples(rig.batch)
            said[kind] = str(raised.value).replace(f"token {token} ", "token N ")
    return said


def test_faulty_experts_are_refused_on_every_rank_with_the_sample(pool):
    wanted = {
        "missing": "sample s3 came with no routed_experts (1 such samples), and rollout.routing_replay=rollout wants",
        "other layers": "came with routed_experts of [tokens, 1, 2] (1 such samples)",
        "twice": "sends token N in layer 1 to experts [2, 2]; each must be another one of 0 to 3",
        "beyond": "sends token N in layer 1 to experts [0, 4]",
        "half": "sends token N in layer 1 to experts [0, -1]",
    }
    for said in pool.run(2, with_faulty_experts, timeout_s=60):
        for kind, words in wanted.items():
            assert words in said[kind] and "set rollout.routing_replay=off" in said[kind], said[kind]


def refused(rank: int, world: int, settings: tuple[str, ...]) -> list[str]:
    said = []
    for each in settings:
        family, given = ("mixtral", (each,)) if each else ("qwen3", ())
        with pytest.raises(ConfigError) as raised, open_rig(family, REPLAY, *given):
            pass
        said.append(str(raised.value))
    return said


def test_what_cannot_be_replayed_is_refused(pool):
    refusals = {"": "replays the experts of a mixture, and the model of model.hf_path has none",
                "moe_router_load_balancing_type=sinkhorn": "would choose experts by the other tokens of a micro-batch",
                "moe_router_force_load_balancing=true": "it routes by numbers drawn at random",
                "moe_expert_capacity_factor=1.0": "it drops tokens of the experts",
                "moe_enable_routing_replay=true": "set by rollout.routing_replay"}
    (found,) = pool.run(1, refused, tuple(f"megatron.transformer.{x}" if x else "" for x in refusals), timeout_s=60)
    assert all(words in said for words, said in zip(refusals.values(), found, strict=True)), found


def a_rollout_of_two_steps(rank: int, world: int) -> list[float]:
    """Return how many tokens each optimizer step of one rollout replayed, under ``old_logprobs``."""
    settings = ("rollout.routing_replay=old_logprobs", "train.samples_per_mini_batch=6", "optimizer.lr=0.01")
    with open_rig("qwen3_moe", *settings, samples=NUM_SAMPLES) as rig:
        run = train_once(fresh_run(rig, ragged_advantages(NUM_SAMPLES) + 1.0, *settings))
        return [result.sums["replayed"] for result in run.results]


def test_the_update_replays_what_its_pass_recorded(pool):
    """The first step takes its own log-probs for π_old and chooses itself; the second replays the pass's experts."""
    for first, second in pool.run(2, a_rollout_of_two_steps, timeout_s=60):
        assert first == 0 and second > 0, (first, second)
