"""Holds the form of a mutant: one line of the package as a tired engineer might have written it, and the tests that must see it."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass

# Each area with the files in which its faults stand; at least two faults in each.
AREAS: dict[str, tuple[str, ...]] = {
    "advantage": ("advantage.py",),
    "estimators": ("estimators.py",),
    "gae": ("gae.py",),
    "loss": ("loss/",),
    "signal": ("signal.py",),
    "noise": ("noise.py",),
    "plan": ("plan.py",),
    "cost": ("cost.py",),
    "schedule": ("schedule.py",),
    "optimizer": ("optimizer.py",),
    "packing": ("packing.py",),
    "log-probs": ("model/logprob.py",),
    "feed": ("feed.py", "intake.py", "verdict.py", "rollout/replay.py", "rollout/reroll.py", "rollout/admission.py"),
    "exchange": ("exchange.py",),
    "trained model": ("trained_model.py",),
    "weights": ("weights/",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """Names one fault and the tests that should fail with it.

    file:    from the repository's root.
    line:    the whole line as it stands there, without the space around it; it occurs once in the file.
    becomes: the line in its place, at the same depth; "" takes it out.
    fault:   what is wrong then, in words.
    tests:   pytest's node ids or files, the quickest first.
    """

    name: str
    file: str
    line: str
    becomes: str
    fault: str
    tests: tuple[str, ...]

    @property
    def area(self) -> str:
        within = self.file.removeprefix("megatron_rl/")
        (found,) = (name for name, files in AREAS.items() if within.startswith(files))
        return found

    def places(self, text: str) -> list[int]:
        """Numbers the lines of a file's text that are the mutant's, from 1."""
        return [number for number, line in enumerate(text.splitlines(), 1) if line.strip() == self.line]

    def planted(self, text: str) -> str:
        """Gives the file's text with the fault in it. Raises LookupError where the line does not occur exactly once."""
        places = self.places(text)
        if len(places) != 1:
            raise LookupError(f"{self.name}: the line occurs {len(places)} times in {self.file}, and must occur once: {self.line}")
        lines = text.splitlines(keepends=True)
        old = lines[places[0] - 1]
        lines[places[0] - 1] = old.replace(self.line, self.becomes)
        return "".join(lines)


def read(root: pathlib.Path, mutant: Mutant) -> str:
    return (root / mutant.file).read_text(encoding="utf-8")
