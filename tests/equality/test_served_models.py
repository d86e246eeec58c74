"""Models that share a server are as in servers of their own; steps are AdamW; what is saved is what is loaded."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_rl.rollout.engines.sampling import SampleRequest
from megatron_rl.serve.values import AdapterSpec
from tests.equality.layouts import PP2, SHARDED, TP2
from tests.equality.rig import equal_by_name
from tests.equality.served_rig import VOCAB, Served, largest_gap, make_data, naive_gradient, open_served
from tests.pairwise import pairwise, quick
from tests.reference import file_weights, relative_error

LORA = ("lora.rank=4", "lora.alpha=8")
PLACES = {"PP2": (2, (PP2,)), "TP2": (2, (TP2,)), "DP2": (2, SHARDED)}
KINDS = {"LoRA": LORA, "whole": ()}
STEPS_TOLERANCE = 1e-5  # float32 and another order of summation
SPECS = {"a": AdapterSpec(rank=4, seed=1), "b": AdapterSpec(rank=2, seed=2, mlp=False)}
# ε keeps AdamW from making steps of gradients that are 0 but for rounding, as those of a key's bias are.
STEPS = [dict(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-4, weight_decay=0.1, grad_clip_norm=0.0),
         dict(learning_rate=3e-3, beta1=0.8, beta2=0.99, eps=1e-3, weight_decay=0.0, grad_clip_norm=0.5),
         dict(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-4, weight_decay=0.3, grad_clip_norm=0.5),
         dict(learning_rate=2e-3, beta1=0.9, beta2=0.999, eps=1e-4, weight_decay=0.0, grad_clip_norm=0.0)]


def assert_all(pool, place: str, function, path: str, folder: str, overrides: tuple[str, ...] = ()) -> None:
    world, layout = PLACES[place]
    for found in pool.run(world, function, path, folder, (*layout, *overrides), timeout_s=120):
        assert all(found.values()), found


def data_of(seed: int, count: int = 5) -> list:
    return make_data("cross_entropy", count, seed=seed, vocab=VOCAB)


def train_by_turns(served: Served, turns: str) -> None:
    """Give models a and b requests and steps by turns: a letter is a request, a capital one a step."""
    numbers = {"a": 0, "b": 100}
    for turn in turns:
        model = turn.lower()
        if turn.isupper():
            served.step(model, learning_rate=1e-2 if model == "a" else 3e-3, weight_decay=0.1)
        else:
            numbers[model] += 1
            served.train(model, "cross_entropy", data_of(numbers[model]))


def two_models(rank: int, world: int, path: str, folder: str, overrides: tuple[str, ...]) -> dict[str, bool]:
    """Train two models in one server by turns, then each in a server of its own; compare to the bit."""
    turns, found = "abAbAaBBA", {}  # each steps while the other has a gradient, and once without one of its own
    lora = any(x.startswith("lora") for x in overrides)
    with open_served(path, f"{folder}/both", *overrides) as served:
        for model, spec in SPECS.items():
            served.create(model, spec if lora else None)
        train_by_turns(served, turns)
        both = {model: (served.weights(model), served.moments(model)) for model in SPECS}
    for model, spec in SPECS.items():
        with open_served(path, f"{folder}/{model}", *overrides) as served:
            served.create(model, spec if lora else None)
            train_by_turns(served, "".join(x for x in turns if x.lower() == model))
            weights, moments = both[model]
            found[f"{model}'s weights"] = equal_by_name(served.weights(model), weights)
            found[f"{model}'s AdamW"] = all(map(torch.equal, served.moments(model), moments))
    found["a is not b"] = not equal_by_name(both["a"][0], both["b"][0])
    return found


@pytest.mark.parametrize(("place", "kind"),
                         pairwise(PLACES, KINDS, kept=[("PP2", "whole"), ("TP2", "LoRA"), ("DP2", "whole")]))
def test_two_models_equal_two_servers(pool, arithmetic, tmp_path, place, kind):
    assert_all(pool, place, two_models, str(arithmetic), str(tmp_path), KINDS[kind])


def steps_of_torch(path: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return weights and norms of torch's own AdamW over the plain loop's gradients; the third step has none."""
    model = AutoModelForCausalLM.from_pretrained(f"{path}/model").float()
    optimizer, norms = torch.optim.AdamW(model.parameters()), []
    for number, given in enumerate(STEPS):
        naive_gradient(model, [("cross_entropy", data_of(number, 0 if number == 2 else 5))])
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), given["grad_clip_norm"] or float("inf"))))
        named = dict(lr=given["learning_rate"], betas=(given["beta1"], given["beta2"]))
        for group in optimizer.param_groups:
            group.update(**named, eps=given["eps"], weight_decay=given["weight_decay"])
        optimizer.step()
    return file_weights(model), norms


def steps(rank: int, world: int, path: str, folder: str, overrides: tuple[str, ...]) -> dict[str, float]:
    want, norms = steps_of_torch(path)
    with open_served(path, folder, *overrides) as served:
        served.create("m")
        found = []
        for number, settings in enumerate(STEPS):
            if number != 2:  # nothing is accumulated before the third: a ghost step
                served.train("m", "cross_entropy", data_of(number))
            metrics = served.step("m", **settings)
            assert metrics["ghost_steps:sum"] == (number == 2)
            found.append(metrics["grad_norm:mean"])
        gaps = [abs(a - b) / max(b, 1.0) for a, b in zip(found, norms, strict=True)]
        weights = served.weights("m")
        assert set(want) - set(weights) <= {"lm_head.weight"}  # tied to the embedding
        want = {name: want[name] for name in weights}
        return {"weights": relative_error(weights, want), "norms": max(gaps)}


@pytest.mark.parametrize("place", quick(PLACES, "PP2", "DP2"))
def test_steps_are_torchs_adamw(pool, arithmetic, tmp_path, place):
    world, overrides = PLACES[place]
    found = pool.run(world, steps, str(arithmetic), str(tmp_path), overrides, timeout_s=120)[0]
    assert max(found.values()) < STEPS_TOLERANCE, found


def saved(rank: int, world: int, path: str, folder: str, overrides: tuple[str, ...]) -> dict[str, bool]:
    """Save in the middle, go on; load with and without AdamW, go on likewise; compare to the bit."""
    spec = SPECS["b"] if any(x.startswith("lora") for x in overrides) else None
    header = {"spec": None if spec is None else {"rank": 2, "seed": 2, "attention": True, "mlp": False}}
    with open_served(path, f"{folder}/first", *overrides) as served:
        served.create("b", spec)
        train_by_turns(served, "bBb")
        served.value("save", model="b", folder=f"{folder}/state", with_adam=True, **header)
        served.value("save", model="b", folder=f"{folder}/sampler", with_adam=False, **header)
        middle = served.weights("b")
        served.do("drop", models=[], weights=[])
        served.worker.models.discard_gradient("b")
        train_by_turns(served, "bBbB")
        end = served.weights("b"), served.moments("b")
    with open_served(path, f"{folder}/second", *overrides) as served:
        served.create("other", spec)  # whose state must not leak in
        train_by_turns(served, "")
        value = served.value("load", model="b", folder=f"{folder}/state", with_adam=True)
        found = {"spec": value["spec"] == header["spec"], "loaded": equal_by_name(served.weights("b"), middle)}
        train_by_turns(served, "bBbB")
        found["goes on"] = equal_by_name(served.weights("b"), end[0])
        found["its AdamW goes on"] = all(map(torch.equal, served.moments("b"), end[1]))
        served.value("load", model="b", folder=f"{folder}/sampler", with_adam=False)
        found["weights alone"] = equal_by_name(served.weights("b"), middle)
        served.train("b", "cross_entropy", data_of(3))
        served.step("b")
        fresh = served.weights("b")
        served.value("load", model="c", folder=f"{folder}/state", with_adam=False)
        served.train("c", "cross_entropy", data_of(3))
        served.step("c")
        found["without AdamW it starts anew"] = equal_by_name(served.weights("c"), fresh)
        refused = served.do("load", model="d", folder=f"{folder}/sampler", with_adam=True)
        found["a sampler's has no AdamW"] = "which have no optimizer state" in (refused.error or "")
        missing = served.do("load", model="d", folder=f"{folder}/nowhere", with_adam=False)
        found["a missing one is named"] = "nowhere" in (missing.error or "")
    return found


@pytest.mark.parametrize(("place", "kind"),
                         pairwise(PLACES, KINDS, kept=[("PP2", "LoRA"), ("TP2", "whole"), ("DP2", "whole")]))
def test_what_is_saved_is_what_is_loaded(pool, arithmetic, tmp_path, place, kind):
    assert_all(pool, place, saved, str(arithmetic), str(tmp_path), KINDS[kind])


def narrow(rank: int, world: int, path: str, folder: str) -> float:
    """Return the gap between an adapter of rank 2 in a server of rank 4, and one in a server of rank 2."""
    weights = {}
    for served_rank in (2, 4):
        with open_served(path, f"{folder}/{served_rank}", f"lora.rank={served_rank}", "lora.alpha=8", PP2) as served:
            served.create("b", AdapterSpec(rank=2, seed=2))
            train_by_turns(served, "bBbB")
            weights[served_rank] = {name: x.clone() for name, x in served.worker.models.activate("b").export()}
    return relative_error(weights[4], weights[2])


def test_a_lower_rank_equals_a_server_of_that_rank(pool, arithmetic, tmp_path):
    assert max(pool.run(2, narrow, str(arithmetic), str(tmp_path), timeout_s=90)) < 1e-5  # sums of other lengths


def failing(rank: int, world: int, path: str, folder: str, overrides: tuple[str, ...]) -> dict[str, bool]:
    """Fail in the middle of a step; what follows is as if the step had not begun."""
    with open_served(path, folder, *overrides) as served:
        served.create("a")
        served.train("a", "cross_entropy", data_of(1))
        served.step("a")
        served.train("a", "cross_entropy", data_of(2))
        found = {"named": "str" in (served.do("forward_backward", model="a", parsed="no call at all").error or "")}
        unknown = served.do("optim_step", model="nobody", adam={})
        found["unknown"] = "'nobody' is not held here" in (unknown.error or "")
        served.train("a", "cross_entropy", data_of(3))
        served.step("a")
        first = served.weights("a")
        served.create("b")
        for number in (1, 3):
            served.train("b", "cross_entropy", data_of(number))
            served.step("b")
        found["half a step is discarded"] = equal_by_name(first, served.weights("b"))
    return found


def test_a_failed_request_leaves_no_half_of_a_step(pool, arithmetic, tmp_path):
    assert_all(pool, "PP2", failing, str(arithmetic), str(tmp_path))


def sampling(rank: int, world: int, path: str, folder: str, overrides: tuple[str, ...]) -> dict[str, bool]:
    """Sample from snapshots of two models and from the base; compare log-probs with the trainer's own."""
    asked = dict(num_samples=3, max_tokens=6, seed=5, prompt_logprobs=True)
    request = SampleRequest(request_id="r", token_ids=(3, 4, 5), **asked)
    fields = {name: getattr(request, name) for name in request.__slots__}
    with open_served(path, folder, *overrides) as served:
        for model, spec in SPECS.items():
            served.create(model, spec)
            train_by_turns(served, model + model.upper())
            served.value("snapshot", model=model, weights=f"w{model}")
        train_by_turns(served, "aA")  # the snapshot stays as it was
        kept, found, drawn = served.weights("b"), {}, {}
        for name in ("wa", "base", "wb"):
            (drawn[name],) = served.value("sample", weights=name, folder=None, requests=[fields])
        model = AutoModelForCausalLM.from_pretrained(f"{path}/model").float()
        sampled = [x.logprobs for x in drawn["base"].sequences]
        found["base log-probs"] = largest_gap(sampled, _naive(model, drawn["base"])) < 1e-5
        found["b is untouched"] = equal_by_name(served.weights("b"), kept)
        again = served.value("sample", weights="wa", folder=None, requests=[fields, {**fields, "request_id": "s"}])
        pairs = zip(drawn["wa"].sequences, again[1].sequences, strict=True)
        found["the same seed, the same draws"] = all(np.array_equal(x.token_ids, y.token_ids) for x, y in pairs)
        found["other weights"] = not np.allclose(drawn["wa"].prompt_logprobs[1:], drawn["wb"].prompt_logprobs[1:])
        gone = served.do("sample", weights="nobody", folder=None, requests=[fields])
        found["unknown"] = "'nobody' are not held here" in (gone.error or "")
    return found


def _naive(model: torch.nn.Module, result) -> list[np.ndarray]:
    """Return the log-probs of sampled tokens by one plain forward each."""
    found = []
    for sequence in result.sequences:
        tokens = np.array([3, 4, 5, *sequence.token_ids])
        logits = model(torch.from_numpy(tokens)[None]).logits[0].float().log_softmax(-1)
        found.append(logits[2:-1].gather(-1, torch.from_numpy(tokens[3:, None]))[:, 0].detach().numpy())
    return found


def test_samplers_hold_the_weights_of_their_snapshot(pool, arithmetic, tmp_path):
    assert_all(pool, "PP2", sampling, str(arithmetic), str(tmp_path), LORA)
