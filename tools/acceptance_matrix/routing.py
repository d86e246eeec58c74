"""Measures routing replay on one layout: log-probs and gradients at given experts, against a loop that forces them."""

from __future__ import annotations

import pathlib

import numpy as np
from acceptance_matrix.cells import Cell
from acceptance_matrix.facts import halve_gradient, on_cpu, worst_of_ranks

from tests.equality.forced_experts import NUM_SAMPLES, given, wanted
from tests.equality.rig import open_rig, ragged_advantages
from tests.reference import relative_error


def measure(cell: Cell, fault: str, deadline_s: float, folder: pathlib.Path) -> dict:
    degrees, layers = [f"parallel.{x}" for x in cell.parallel], 2 * cell.virtual
    logprobs, gradient = wanted(cell.family, layers)
    advantages = ragged_advantages(NUM_SAMPLES)
    settings = (f"run.deadline_s={deadline_s}", "rollout.routing_replay=rollout", *degrees, *cell.overrides)
    with open_rig(cell.family, *settings, layers=layers) as rig:
        rig.take(list(given(cell.family, layers)))
        if fault == "lose-experts":
            rig.backend.schedule.parts = ()
        found = rig.backend.logprobs(rig.batch, np.ones(NUM_SAMPLES, dtype=bool)).flat
        plan = rig.plan(advantages, drops=True)
        rig.accumulate(advantages, plan)
        if fault == "drop-gradient":
            halve_gradient(rig.backend)
        ours = on_cpu(rig.backend.gradient())
        return worst_of_ranks(
            {"logprobs": float(np.abs(found - logprobs).max()), "gradient": relative_error(ours, gradient)}
        )
