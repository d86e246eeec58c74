"""Every numeric setting has a range, which its table prints and which refuses NaN, infinity and what lies beyond."""

import dataclasses
import math
import re
from typing import Annotated

import pytest

from megatron_rl.config import Config
from megatron_rl.config.checks import Range, check_ranges, hints_of, parts_of, range_of
from megatron_rl.errors import ConfigError
from tools import config_table


def numeric_fields() -> dict[str, object]:
    """Return the type of every field of the configuration that holds numbers, by its key."""
    return {f"{key}.{field.name}": hints_of(section)[field.name]
            for key, section in config_table.sections()
            for field in config_table.leaf_fields(section)
            if {int, float} & {kind for kind, _ in parts_of(hints_of(section)[field.name])}}


NUMERIC = numeric_fields()


def changed(config: Config, key: str, value: object) -> Config:
    """Return the configuration with another value of ``key``, built as Python code does it."""
    name, _, rest = key.partition(".")
    inner = changed(vars(config)[name], rest, value) if rest else value
    return dataclasses.replace(config, **{name: inner})


def test_types_within_a_hint_come_with_their_ranges() -> None:
    assert {"optimizer.betas", "reward.weights", "lora.rank", "rollout.producer.min_groups"} <= set(NUMERIC)
    assert len(NUMERIC) > 100
    bounds = Range(1)
    parts = list(parts_of(tuple[Annotated[int, bounds], ...] | None))
    assert parts == [(int, bounds), (..., None), (type(None), None)] and range_of(str | None) is None


def test_every_number_has_a_range() -> None:
    """A new numeric field declares its range: ``Annotated[int, Range(1)]`` (megatron_rl/config/checks.py)."""
    for key, hint in NUMERIC.items():
        for kind, bounds in parts_of(hint):
            if kind in (int, float):
                assert bounds is not None, f"{key} has no range; write Annotated[{kind.__name__}, Range(low, high)]"
                assert -math.inf < bounds.low < bounds.high < math.inf, key


def test_what_lies_beyond_is_refused_with_key_value_and_range() -> None:
    for key, hint in NUMERIC.items():
        bounds = range_of(hint)
        beyond = [math.nan, math.inf, -math.inf, 10**18, bounds.low - 1, bounds.high * 2, True, "many"]
        beyond += [bounds.low] * bounds.open_low + [bounds.high] * bounds.open_high
        for number in beyond:
            value = (number, number) if "tuple" in str(hint) else number
            with pytest.raises(ConfigError, match=rf"^{key}=.* must be .*{re.escape(bounds.words)}"):
                check_ranges(*section_with(key, value))
                pytest.fail(f"{key}={value} was not refused")


def section_with(key: str, value: object) -> tuple[object, str]:
    """Return a section that holds ``value`` at ``key`` without having been checked, and its own key."""
    section_key, _, name = key.rpartition(".")
    section = object.__new__(dict(config_table.sections())[section_key])
    vars(section).update({field.name: None for field in dataclasses.fields(section)} | {name: value})
    return section, section_key


def test_a_configuration_built_in_python_is_checked_too() -> None:
    for key, value in (("optimizer.lr", math.nan), ("rollout.producer.prefetch_rollouts", -1)):
        with pytest.raises(ConfigError, match=f"^{key}={value} must be at least"):
            changed(Config(), key, value)


def test_a_range_is_written_alike_in_message_and_table() -> None:
    for bounds, words, cell in (
        (Range(1), "at least 1 and at most 1e9", "1 to 1e9"),
        (Range(0, 1, open_low=True), "above 0 and at most 1", "above 0 to 1"),
        (Range(0, 1, open_high=True), "at least 0 and below 1", "0 to below 1"),
        (Range(-(10**6), 10**6), "at least -1e6 and at most 1e6", "-1e6 to 1e6"),
        (Range(1, 10**12), "at least 1 and at most 1e12", "1 to 1e12"),
        (Range(1e-20, 0.5), "at least 1e-20 and at most 0.5", "1e-20 to 0.5"),
        (Range(0, 2**31 - 1), "at least 0 and at most 2147483647", "0 to 2147483647"),
    ):
        assert (bounds.words, bounds.cell) == (words, cell)


def test_the_table_prints_the_range_of_each_number() -> None:
    page = config_table.PAGE.read_text(encoding="utf-8")
    rows = {line.split("`")[1]: line.split("|")[3].strip() for line in page.splitlines() if line.startswith("| `")}
    assert {key: rows[key] for key in NUMERIC} == {key: range_of(hint).cell for key, hint in NUMERIC.items()}
