"""Tinker's SDK, as it is installed, trains, saves, loads and samples on a server of two processes."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("tinker", reason="Tinker's SDK is not installed; `make test-tinker` installs it")

import tinker
import torch
from tinker import types

from tests.patience import patient
from tests.runs.command import ROOT
from tests.tinker.clients import ADAM, TEXTS, answer, datum, logprobs, scores, service, texts, trainer

OLDEST = pathlib.Path(sys.prefix) / "sdk-0.34.0"


@pytest.fixture
def client(address: str) -> tinker.ServiceClient:
    return service(address)


def step(client: tinker.TrainingClient, data: list[types.Datum], loss: str = "cross_entropy", **config: float) -> None:
    promise = client.forward_backward(data, loss, loss_fn_config=config or None)
    answer(client.optim_step(ADAM))
    answer(promise)


def test_what_is_trained_saved_loaded_and_sampled_agrees(client: tinker.ServiceClient) -> None:
    model = trainer(client)
    before = scores(model)
    for _ in range(5):
        step(model, texts())
    after = scores(model)
    assert after.sum() > before.sum() + 1.0  # it learned the texts
    path = answer(model.save_state("five")).path
    sampler_path = answer(model.save_weights_for_sampler("five")).path
    made, filled = client.create_training_client_from_state_with_optimizer(path), trainer(client, seed=1)
    answer(filled.load_state_with_optimizer(path))
    assert all(np.array_equal(scores(other), after) for other in (made, filled))
    for each in (model, made, filled):
        step(each, texts())
    want = scores(model)
    assert not np.array_equal(want, after)
    assert all(np.array_equal(scores(other), want) for other in (made, filled))  # Adam's moments were loaded too
    named = client.create_sampling_client(model_path=sampler_path)
    found = [answer(named.compute_logprobs(types.ModelInput.from_ints(tokens))) for tokens in TEXTS]
    assert [values[0] for values in found] == [None] * len(TEXTS)
    assert np.allclose(np.concatenate([np.float32(values[1:]) for values in found]), after, atol=1e-5)
    params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=3)
    prompt = types.ModelInput.from_ints(TEXTS[0][:2])
    draws = [answer(named.sample(prompt, 2, params)).sequences for _ in range(2)]
    assert [x.tokens for x in draws[0]] == [x.tokens for x in draws[1]]
    for sequence in draws[0]:  # the sampler's log-probs are the trainer's
        whole = TEXTS[0][:2] + list(sequence.tokens)
        again = answer(named.compute_logprobs(types.ModelInput.from_ints(whole)))
        assert np.allclose(again[2:], sequence.logprobs, atol=1e-5)


def test_records_of_a_client_are_its_own(client: tinker.ServiceClient, address: str) -> None:
    model = trainer(client)
    path = answer(model.save_state("kept")).path
    rest = client.create_rest_client()
    assert answer(rest.get_training_run(model.model_id)).training_run_id == model.model_id
    names = [checkpoint.tinker_path for checkpoint in answer(rest.list_checkpoints(model.model_id)).checkpoints]
    assert path in names
    stranger = service(address, "tml-stranger")
    with pytest.raises(tinker.NotFoundError, match="is another client's"):
        answer(stranger.create_rest_client().get_training_run(model.model_id))
    with pytest.raises(tinker.NotFoundError, match="is another client's"):
        answer(stranger.create_training_client_from_state(path))


LOSSES = {
    "importance_sampling": {}, "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "cispo": {"clip_low_threshold": 0.5, "clip_high_threshold": 1.1}, "dro": {"beta": 0.3},
}  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_are_the_published_formulas(client: tinker.ServiceClient, loss: str) -> None:
    settings = LOSSES[loss]
    random = np.random.default_rng(0)
    lengths = [len(tokens) - 1 for tokens in TEXTS]
    old = [random.normal(-5.5, 0.2, n) for n in lengths]
    advantages = [random.normal(0, 1, n) for n in lengths]
    data = [datum(*row[:1], logprobs=row[1], advantages=row[2]) for row in zip(TEXTS, old, advantages, strict=True)]
    output = answer(trainer(client).forward_backward(data, loss, loss_fn_config=settings or None))
    new = np.concatenate(logprobs(output)).astype(np.float64)
    old, advantages = np.float32(np.concatenate(old)), np.float32(np.concatenate(advantages))
    ratio = np.exp(new - old)
    clipped = np.clip(ratio, settings.get("clip_low_threshold", 0), settings.get("clip_high_threshold", np.inf))
    want = {
        "importance_sampling": ratio * advantages, "ppo": np.minimum(ratio * advantages, clipped * advantages),
        "cispo": clipped * new * advantages, "dro": new * advantages - 0.15 * (new - old) ** 2,
    }[loss]  # fmt: skip
    assert output.metrics["loss:sum"] == pytest.approx(-want.sum(), rel=1e-5)


def test_a_loss_of_the_clients_own_trains_as_the_servers(client: tinker.ServiceClient) -> None:
    """The gradient of a weighted sum of log-probs, once by autograd in the client and once by cross_entropy."""
    weights = [[0.5, -1.0, 2.0, 0.0], [1.0, 1.0], [0.0, 0.25, -0.5]]
    data = [datum(tokens, weights=row) for tokens, row in zip(TEXTS, weights, strict=True)]

    def loss(data: list[types.Datum], found: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        total = -sum((values * torch.tensor(row)).sum() for values, row in zip(found, weights, strict=True))
        return total, {"custom": float(total)}

    plain, custom, bare = trainer(client), trainer(client), [datum(tokens) for tokens in TEXTS]
    for _ in range(2):
        want = answer(plain.forward_backward(data, "cross_entropy")).metrics["loss:sum"]
        answer(plain.optim_step(ADAM))
        output = answer(custom.forward_backward_custom(bare, loss))
        answer(custom.optim_step(ADAM))
        assert output.metrics["custom"] == pytest.approx(want, abs=1e-4)
    assert np.allclose(scores(plain), scores(custom), atol=1e-5)


@pytest.mark.long
def test_chunks_of_the_client_add_up(client: tinker.ServiceClient) -> None:
    """1100 data go in two requests, for the SDK sends at most 1024 in one."""
    one, cut = trainer(client), trainer(client)
    step(cut, [datum(TEXTS[1], weights=[0.01, 0.02])] * 1100)
    step(one, [datum(TEXTS[1], weights=[11.0, 22.0])])
    assert np.allclose(scores(one), scores(cut), atol=1e-5)


def test_targets_of_several_columns_dense_and_sparse(client: tinker.ServiceClient) -> None:
    model = trainer(client)
    targets = torch.tensor([[66, 1], [67, 2], [68, 3], [69, 4]])
    weights = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.5, 0.0], [0.0, -2.0]])
    found, given = [], types.ModelInput.from_ints(TEXTS[0][:-1])
    for tensor in (types.TensorData.from_torch(weights), types.TensorData.from_torch_sparse(weights)):
        inputs = {"target_tokens": types.TensorData.from_torch(targets), "weights": tensor}
        found.append(answer(model.forward([types.Datum(model_input=given, loss_fn_inputs=inputs)], "cross_entropy")))
    values = [np.asarray(output.loss_fn_outputs[0]["logprobs"].to_torch()) for output in found]
    assert values[0].shape == (4, 2) and np.array_equal(*values)
    want = -(values[0].astype(np.float64) * weights.numpy()).sum()
    assert [output.metrics["loss:sum"] for output in found] == pytest.approx([want] * 2, rel=1e-5)


def test_stable_reinforce_is_refused_by_name(client: tinker.ServiceClient) -> None:
    data = [datum(TEXTS[0], logprobs=[-5.0] * 4, advantages=[1.0] * 4)]
    with pytest.raises(Exception, match="stable_reinforce.*importance_sampling.*ppo.*cispo.*gspo"):
        answer(trainer(client).forward_backward(data, "stable_reinforce"))


def first_steps(address: str, path: str) -> dict:
    """Run first_steps.py in an interpreter of its own, with a folder before the installed packages."""
    command = [sys.executable, "-m", "tests.tinker.first_steps", address]
    environment = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{ROOT}"}
    said = dict(capture_output=True, text=True, timeout=patient(240), check=False)
    done = subprocess.run(command, cwd=ROOT, env=environment, **said)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_both_ends_of_the_range_of_the_sdk_get_the_same(address: str) -> None:
    assert OLDEST.is_dir(), f"{OLDEST} is missing; `make test-tinker` makes it"
    oldest, newest = first_steps(address, str(OLDEST)), first_steps(address, "")
    assert (oldest.pop("version"), newest.pop("version")) == ("0.34.0", "0.38.0")
    assert oldest == newest and newest["losses"][-1] < newest["losses"][0]
