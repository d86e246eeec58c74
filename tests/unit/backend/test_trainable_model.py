"""Checks backend/trainable_model.py without a model: plans that merge, measurements that reach the fitted costs."""

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_rl.backend.batch import Batch
from megatron_rl.backend.optimizer import StepOutcome
from megatron_rl.backend.schedule import StageLaps
from megatron_rl.backend.step_sums import StepSums
from megatron_rl.backend.trainable_model import TrainableModel
from megatron_rl.config import load_config
from megatron_rl.planning.cost import NUM_SUMS, CostFit, CostModel, StageCost
from megatron_rl.planning.plan import PlanRules
from megatron_rl.types import StepKind
from tests.unit.algorithm.facts import make_facts


def model_of(*overrides: str, **fields: object) -> TrainableModel:
    """Make a model with its configuration and the fields given, and with neither chunks nor a world."""
    model = object.__new__(TrainableModel)
    model.config, model.rules = load_config(None, overrides), PlanRules()
    model.shape = SimpleNamespace(windows=())
    for name, value in fields.items():
        setattr(model, name, value)
    return model


@pytest.mark.parametrize("mode", ["exact", "approximate", "off"])
@pytest.mark.parametrize("steps", ["merge", "match"])
@pytest.mark.parametrize("drops", [True, False])
@pytest.mark.parametrize("passes", [False, True])
def test_a_plan_has_one_step_where_it_merges_and_one_per_mini_batch_elsewhere(mode: str, steps: str, drops: bool,
                                                                              passes: bool) -> None:
    """A plan that drops nothing merges nothing: neither under skip.mode=off nor where the caller drops nothing."""
    model = model_of("train.samples_per_mini_batch=2", f"skip.mode={mode}", f"skip.steps={steps}")
    batch = Batch(facts=make_facts([0, 0, 1, 1, 2], [3, 4, 5, 6, 7]), local=())
    plan = (model.plan_pass if passes else model.plan_training)(batch, np.ones(5, dtype=bool), drops=drops)
    assert plan.purpose == ("logprob" if passes else "train")
    whole = passes or (steps == "merge" and drops and mode != "off")
    assert [x.members.tolist() for x in plan.mini_batches] == ([[0, 1, 2, 3, 4]] if whole else [[0, 1], [2, 3], [4]])


def sums_of(*values: float) -> StepSums:
    sums = StepSums(("loss", "tokens")[: len(values)], 0)
    sums.add([torch.tensor(values, dtype=torch.float64)])
    return sums


def test_a_gradient_that_is_thrown_away_is_measured_nowhere() -> None:
    told = []
    model = model_of(optimizer=SimpleNamespace(zero_grad=lambda: told.append("gradient")),
                     schedule=SimpleNamespace(forget_measured=lambda: told.append("laps")), _sums=sums_of(1.0, 1.0),
                     _accumulated=True)
    model.zero_grad()
    assert sorted(told) == ["gradient", "laps"] and not model._sums.values.any() and not model._accumulated


@pytest.fixture
def alone() -> Iterator[None]:
    """Make a world of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stages_laps_are_fitted_as_its_own(alone: None, stage: int) -> None:
    seconds = dict(forward_s=np.ones((1, 1)), backward_s=np.full((1, 1), 2.0))
    laps = StageLaps(**seconds, tokens=np.array([3.0]), squares=np.array([9.0]))
    outcome = StepOutcome(grad_norm=1.0, learning_rate=0.1, applied=True)
    model = model_of("plan.calibrate=false",
                     sum_names=("loss",),
                     step_index=0,
                     weight_version=0,
                     _accumulated=True,
                     fit=CostFit(prior=CostModel(stages=(StageCost(overhead=1.0, token=1.0, square=0.0),) * 2)),
                     topology=SimpleNamespace(pipeline_rank=stage),
                     schedule=SimpleNamespace(take_laps=lambda: [laps]),
                     optimizer=SimpleNamespace(step=lambda kind, adam: outcome),
                     _sums=sums_of(0.5),
                     optimizer_s=[])
    assert model.optim_step(StepKind.REAL).sums == {"loss": 0.5}
    assert model.fit.sums.shape == (2, NUM_SUMS) and not model.fit.sums[1 - stage].any()
    assert model.fit.sums[stage].tolist() == [1.0, 3.0, 9.0, 9.0, 27.0, 81.0, 1.0, 3.0, 9.0, 1.0, 2.0]
