"""Each loss is refused what it cannot read, by name; its inputs and clip counts are those of its formula."""

import dataclasses

import numpy as np
import pytest
import torch

from megatron_rl.serve.bodies import check_sdk, stop_conditions
from megatron_rl.serve.losses import LOSSES, check_inputs, coefficients, served_loss, without_least
from megatron_rl.serve.naming import line_of, parse_checkpoint
from megatron_rl.serve.values import Datum, RequestError


def datum(tokens=(3, 4), width: int = 1, **inputs: float) -> Datum:
    shape = (len(tokens), width)
    return Datum(
        tokens=np.array(tokens),
        targets=np.full(shape, 5),
        inputs={name: np.full(shape, value, dtype=np.float32) for name, value in inputs.items()},
        flat=width == 1,
    )


POLICY = dict(logprobs=-1.0, advantages=1.0)


def test_a_loss_or_setting_that_is_not_served_and_a_datum_that_cannot_be_read_are_named() -> None:
    for name, settings, words in (
        ("stable_reinforce", {}, "no published formula.*importance_sampling.*ppo.*cispo.*gspo"),
        ("grpo", {}, "pass one of cross_entropy, importance_sampling, ppo, cispo, dro, gspo"),
        ("cross_entropy", {"beta": 1.0}, "'beta', which loss_fn='cross_entropy' does not read"),
        ("ppo", {"beta": 1.0}, "it reads clip_high_threshold, clip_low_threshold"),
        ("ppo", {"clip_low_threshold": 2.0}, "clip_low_threshold=2 is above clip_high_threshold=1.2"),
        ("dro", {"beta": float("nan")}, "must be a number of float32's range"),
        ("ppo", {"clip_low_threshold": -1e308}, "must be a number of float32's range"),
        ("dro", {"beta": "much"}, "must be a number of float32's range"),
    ):
        with pytest.raises(RequestError, match=words):
            served_loss(name, settings)
    for loss, data, words in (
        ("ppo", datum(advantages=1.0), r"data\[0\] has no logprobs, which loss_fn='ppo' reads"),
        ("ppo", datum(weights=0.5, **POLICY), "weights is not read by loss_fn='ppo'; multiply the advantages by them"),
        ("ppo", datum(sequence_ratio_mask=1.0, **POLICY), "sequence_ratio_mask is not read"),
        ("ppo", datum(width=2, **POLICY), r"is \[N, K\], which cross_entropy alone takes"),
        ("cross_entropy", datum(tokens=(3, 9)), "holds token 9, and the vocabulary has 9 tokens"),
        ("cross_entropy", datum(tokens=(3, -1)), "holds token -1"),
        ("cross_entropy", datum(tokens=(3,) * 5), "has 5 tokens, and this model reads 4 at most"),
    ):
        with pytest.raises(RequestError, match=words):
            check_inputs(served_loss(loss, {}), [data], 9, 4)


def test_missing_weights_are_taken_and_only_the_square_trains_without_a_coefficient() -> None:
    check_inputs(served_loss("ppo", {}), [datum(weights=1.0, **POLICY)], 9, 4)  # the cookbook sends a mask so
    plain = served_loss("cross_entropy", {})
    check_inputs(plain, [datum()], 9, 4)
    assert coefficients(plain, datum()).tolist() == [[1], [1]]
    assert [name for name in LOSSES if served_loss(name, {}).trains_all] == ["dro"]
    assert not served_loss("dro", {"beta": 0.0}).trains_all


def test_stops() -> None:
    assert stop_conditions(None, (1, 2), 9) == ((1, 2), ())
    assert stop_conditions([], (1, 2), 9) == ((), ())
    assert stop_conditions("x", (1,), 9) == ((), ("x",)) == stop_conditions(["x"], (1,), 9)
    assert stop_conditions([3, 4], (1,), 9) == ((3, 4), ())
    for wrong in ([9], [-1], [10**30]):
        with pytest.raises(RequestError, match="stop"):
            stop_conditions(wrong, (1,), 9)


def test_names_are_taken_apart_and_what_names_no_checkpoint_or_leaves_its_folder_is_refused() -> None:
    paths = ("", "tinker://a/weights", "tinker://a/other/b", "tinker://a/weights/../b", "a/b/c")
    names = ("..", ".", "-x", "a/b", "a b", "", "x" * 201, "a\0")
    for path in (*paths, *(f"tinker://s:train:0/weights/{name}" for name in names)):
        with pytest.raises(RequestError):
            parse_checkpoint(path)
            pytest.fail(f"{path!r} was taken")
    path = parse_checkpoint("tinker://s-1:train:0/sampler_weights/final")
    assert str(path) == "tinker://s-1:train:0/sampler_weights/final" and path.id == "sampler_weights/final"
    assert line_of("s-1:train:0:12") == ("s-1:train:0", 12)
    with pytest.raises(RequestError):
        line_of("what")


def test_a_release_of_the_sdk_outside_the_range_is_told_the_range() -> None:
    for version in ("0.33.9", "0.39.0", "1.0", "", None, "new"):
        with pytest.raises(RequestError, match="speaks to tinker 0.34 to 0.38"):
            check_sdk(version)
    check_sdk("0.34.0")
    check_sdk("0.38.7")


def test_advantages_that_rounding_left_count_as_zero_where_asked() -> None:
    left = torch.tensor([-0.1] * 8) - torch.tensor([-0.1] * 8).mean()  # as tinker-cookbook centers a group
    assert left.abs().max() > 0
    sent = np.array([float(left[0]), 0.5, -1e-6], dtype=np.float32)
    plain = datum((1, 2, 3), logprobs=-1.0, weights=1.0)
    given = dataclasses.replace(plain, inputs={**plain.inputs, "advantages": sent[:, None]})
    ppo = served_loss("ppo", {})
    assert coefficients(ppo, without_least(ppo, given, 0.0))[:, 0].tolist() == sent.tolist()
    assert coefficients(ppo, without_least(ppo, given, 1e-5))[:, 0].tolist() == [0.0, 0.5, 0.0]
    supervised = served_loss("cross_entropy", {})
    assert without_least(supervised, given, 1.0) is given


def test_the_least_advantage_is_a_size_whatever_the_sign() -> None:
    sent, least = np.array([-1.0, -0.2, -0.1, -0.0, 0.1, 0.2, 1.0], dtype=np.float32), float(np.float32(0.1))
    plain = datum(range(7), logprobs=-1.0)
    given = dataclasses.replace(plain, inputs={**plain.inputs, "advantages": sent[:, None]})
    ppo = served_loss("ppo", {})
    wanted = [0.0 if abs(x) <= least else x for x in sent.tolist()]
    assert coefficients(ppo, without_least(ppo, given, least))[:, 0].tolist() == wanted
