"""Compares update.py's contenders: their gradients with each other, their times in turn, the best of each family."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

BAR = 1e-5
"""The largest relative error. Seen on a CPU: 3e-7 if both are right; 3e-4 if the loss's denominator is one token of
3,373 off, 4e-3 if one of 64 samples has 1.1 times its advantage, 7e-2 if one weight of a norm is doubled (--fault)."""


class GradientsDiffer(RuntimeError):
    """Says that two sides' gradients are further apart than the bar, or are not of the same weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """Describes one setting of one side.

    family: trl_shipped, trl_helped, dense or skip.
    tokens: positions that go through the model.
    """

    family: str
    name: str
    tokens: int
    gradient: Callable[[], Mapping]
    update: Callable[[], None]


FAMILIES = {
    "trl_shipped": "TRL, best as it ships",
    "trl_helped": "TRL, best of all settings",
    "dense": "megatron_rl, dense",
    "skip": "megatron_rl, skip",
}


def gradient_error(found: Mapping, wanted: Mapping) -> dict:
    """Return ‖found − wanted‖ / ‖wanted‖ over all weights, in float64, and the weight that adds most to it.

    Raises GradientsDiffer if the names or shapes are not the same.
    """
    if set(found) != set(wanted):
        missing, surplus = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
        raise GradientsDiffer(
            f"not the same weights: missing {missing[:3]}, surplus {surplus[:3]}; both sides must have the same model"
        )
    shapes = {
        name: (tuple(found[name].shape), tuple(wanted[name].shape))
        for name in wanted
        if found[name].shape != wanted[name].shape
    }
    if shapes:
        raise GradientsDiffer(
            f"not the same shapes: {dict(list(shapes.items())[:3])}; both sides must have the same model"
        )
    squares = {name: float((found[name].double() - wanted[name].double()).square().sum()) for name in wanted}
    norm = math.sqrt(sum(float(x.double().square().sum()) for x in wanted.values()))
    worst = max(squares, key=lambda name: (math.isnan(squares[name]), squares[name]))
    total = math.sqrt(sum(squares.values()))
    return {"error": total / norm if norm > 0 else math.inf, "norm": norm, "worst": worst}


def compare_gradients(contenders: Sequence[Contender], bar: float) -> list[dict]:
    """Compare each side with the other: TRL's settings with the first dense one, megatron_rl's with the first of TRL's.

    Raises GradientsDiffer at the first that is not below the bar; not a number is not below it.
    """
    first = {side: next(x for x in contenders if x.family == side) for side in ("trl_shipped", "dense")}
    gradients = {side: x.gradient() for side, x in first.items()}
    checks = []
    for contender in contenders:
        other = "dense" if contender.family.startswith("trl") else "trl_shipped"
        known = next((gradients[side] for side, x in first.items() if x is contender), None)
        measured = gradient_error(contender.gradient() if known is None else known, gradients[other])
        checks.append({"setting": contender.name, "against": first[other].name, **measured})
        if not measured["error"] < bar:
            raise GradientsDiffer(
                f"the gradient of [{contender.name}] differs from that of [{first[other].name}] by "
                f"{measured['error']:.3e} of its norm {measured['norm']:.3e}, not below {bar:.0e}, most in "
                f"{measured['worst']}; nothing was measured. The extra [benchmark] pins a trl whose loss is known to "
                "be the same: pip install -c constraints.txt -e '.[benchmark]'"
            )
    return checks


def time_contenders(contenders: Sequence[Contender], repeats: int, tokens: int, *, warm_up: int = 1) -> list[dict]:
    """Return medians over ``repeats`` rounds, in each of which every contender takes one step.

    ``warm_up`` rounds come first and do not count.
    """
    seconds: dict[str, list[tuple[float, float]]] = {entry.name: [] for entry in contenders}
    for repeat in range(-warm_up, repeats):
        for contender in contenders:
            started, cpu_started = time.perf_counter(), time.process_time()
            contender.update()
            timed = (time.perf_counter() - started, time.process_time() - cpu_started)
            if repeat >= 0:
                seconds[contender.name].append(timed)
    rows = []
    for entry in contenders:
        wall, cpu = (statistics.median(values) for values in zip(*seconds[entry.name], strict=True))
        rows.append(
            {
                "family": entry.family,
                "setting": entry.name,
                "positions": entry.tokens,
                "s": wall,
                "cpu_s": cpu,
                "tokens_per_s": tokens / wall,
                "all_s": [values for values, _ in seconds[entry.name]],
            }
        )
    return rows


def best_of(rows: Sequence[dict]) -> dict[str, dict]:
    """Return the fastest row of each family, with its speed over each of TRL's two bests, by seconds and CPU seconds.

    ``trl_helped`` is TRL's best of all its settings: the help must not make it slower.
    """
    best = {family: min((x for x in rows if x["family"] == family), key=lambda x: x["s"]) for family in FAMILIES}
    best["trl_helped"] = min(best["trl_helped"], best["trl_shipped"], key=lambda x: x["s"])
    return {
        family: {
            **row,
            "over_shipped": best["trl_shipped"]["s"] / row["s"],
            "over_helped": best["trl_helped"]["s"] / row["s"],
            "cpu_over_helped": best["trl_helped"]["cpu_s"] / row["cpu_s"],
        }
        for family, row in best.items()
    }
