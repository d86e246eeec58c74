"""Measures PPO's critic on one layout: values, and the gradient of their loss, against a Hugging Face reward model."""

from __future__ import annotations

import pathlib

import numpy as np
import torch
from acceptance_matrix.cells import Cell
from acceptance_matrix.facts import halve_gradient, on_cpu, worst_of_ranks

from tests.equality.critic_rig import naive, one_gradient, open_critic, targets, values_of
from tests.reference import relative_error


def measure(cell: Cell, fault: str, deadline_s: float, folder: pathlib.Path) -> dict:
    degrees = [f"parallel.{x}" for x in cell.parallel]
    with open_critic(
        cell.family, "model.layer_spec=torch", f"run.deadline_s={deadline_s}", *degrees, *cell.overrides
    ) as pair:
        critic, batch = pair.critic, pair.batch
        with torch.no_grad():
            wanted = np.concatenate([values_of(pair.judge, s).numpy() * s.loss_mask for s in pair.samples])
        if fault == "wrong-weight" and critic.topology.rank == critic.topology.world_size - 1:
            for parameter in critic.parameters():
                parameter.data.add_(0.01)
        found = np.asarray(critic.values(batch))
        returns, old = (np.concatenate(x) for x in targets(pair.samples))
        if fault == "drop-gradient":
            accumulate = critic.accumulate

            def halved(*arguments: object) -> None:
                accumulate(*arguments)
                halve_gradient(critic)

            critic.accumulate = halved
        with critic._here():
            gradient, _ = one_gradient(critic, batch, returns, old)
        theirs, _ = naive(pair.judge, pair.samples, pair.groups, critic.config.loss.reduction)
        return worst_of_ranks(
            {"values": float(np.abs(found - wanted).max()), "gradient": relative_error(on_cpu(gradient), theirs)}
        )
