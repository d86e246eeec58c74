"""Checks tools/check_own_parts.py: every property with its result, the gradient, and the exit code."""

from __future__ import annotations

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))

import check_own_parts


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--loss", "tests.own_parts:clipped", "--arguments", "low=0.1"], 0, ["equal: the loss stops no gradient"]),
        (["--loss", "tests.own_parts:quadratic"], 1, ["FAILS  a zero advantage", "skip.mode=exact refuses it"]),
        (["--loss", "tests.own_parts:mean"], 1, ["FAILS  one finite loss per token"]),
        (["--loss", "tests.own_parts:none"], 2, ["has no 'none'"]),
        (["--estimator", "tests.own_parts:centred"], 0, ["holds  the order of the samples"]),
        (["--estimator", "tests.own_parts:by_batch"], 1, ["all rewards of its group are equal"]),
        (["--estimator", "tests.own_parts:by_batch", "--moves-equal-rewards"], 0, ["holds"]),
    ],
)
def test_each_part_gets_its_properties_and_its_exit_code(capsys, arguments, code, said):
    assert check_own_parts.main(arguments) == code
    output = "".join(capsys.readouterr())
    assert all(words in output for words in said), output
