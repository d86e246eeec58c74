"""Ranges around an object's methods: what they say, how they nest, and that nothing is left of them."""

import contextlib
from collections.abc import Iterator

import pytest

from megatron_rl.observability.profile.ranges import Ranges


class Engine:
    """Has a method of its class, and a function of its own."""

    def __init__(self) -> None:
        self.score = len

    def generate(self, prompts: list[str], *, fails: bool = False) -> int:
        """Score the prompts, after an error that is asked for."""
        if fails:
            raise KeyError("asked for")
        return self.score(prompts)


def marked(said: list[str]):
    @contextlib.contextmanager
    def mark(name: str) -> Iterator[None]:
        said.append(f"<{name}")
        try:
            yield
        finally:
            said.append(f"{name}>")

    return mark


def test_ranges_nest_and_are_taken_off() -> None:
    said, engine = [], Engine()
    own = dict(vars(engine))
    ranges = Ranges(marked(said), "whole")
    ranges.put_around(engine, "generate", lambda prompts, **_: f"generate {len(prompts)}")
    ranges.put_around(engine, "score", "score")
    assert engine.generate(["a", "b"]) == 2
    with pytest.raises(KeyError):
        engine.generate([], fails=True)
    ranges.take_off()
    whole = "<whole <generate 2 <score score> generate 2> <generate 0 generate 0> whole>"
    assert " ".join(said) == whole and vars(engine) == own
    assert engine.generate(["a"]) == 1 and " ".join(said) == whole
