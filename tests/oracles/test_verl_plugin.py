"""The plug-in for verl against verl's own Megatron engine: gradients, weights after steps, what runs and what is said.

Both engines are verl's, on a thin model (tests/oracles/verl_rig.py), and run verl's own loss closures.
"""

from __future__ import annotations

import functools
import logging
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.distributed import platform  # noqa: F401  (before verl brings megatron.core)
from tests.equality.layouts import TOLERANCE
from tests.oracles.batch import MISSING
from tests.workers.pool import Pool

algorithms = pytest.importorskip("verl.trainer.ppo.core_algos", reason=MISSING)

from tests.oracles import verl_rig as rig  # noqa: E402
from verl.utils.metric import Metric  # noqa: E402
from verl.workers.engine.base import EngineRegistry  # noqa: E402
from verl.workers.utils.losses import sft_loss  # noqa: E402

from megatron_rl.integrations import verl as plugin  # noqa: E402
from megatron_rl.integrations import verl_engine  # noqa: E402
from megatron_rl.integrations.verl_rows import (  # noqa: E402
    EXACT_LOSS_MODES,
    Rows,
    loss_obstacles,
    model_obstacles,
    rows_of,
)

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
NUM_ROWS = 8
# which rows are dead: some of both ranks' (row 1 has no advantage under its mask), all of one rank's, all but one of each
DEAD = ({2, 3, 4, 7}, {4, 5, 6, 7}, {0, 2, 3, 4, 6, 7}, set())


def values(metrics: dict) -> dict[str, float]:
    return {name: value.aggregate() for name, value in metrics.items() if isinstance(value, Metric)}


def gradient(engine, data, loss) -> tuple[dict[str, torch.Tensor], dict, int]:
    """Return one mini-batch's reduced gradients, its output, and the micro-batches that ran."""
    engine.optimizer_zero_grad()
    engine.num_forwards = 0
    output = engine.forward_backward_batch(data, loss)
    return engine.gradients(), output, engine.num_forwards


def differences(rank: int, world: int, **layout) -> list[tuple]:
    """Compare both engines' gradients over reductions, dead rows, cuts and kinds of tensors."""
    own, skipping = rig.build(rig.Own, **layout), rig.build(rig.Skipping, **layout)
    found = []
    for index, mode in enumerate(MODES):
        for number, dead in enumerate(DEAD):
            dynamic, jagged = (index + number) % 2 == 0, (index + number) % 3 == 0
            loss = rig.loss_of(loss_agg_mode=mode, loss_scale_factor=20)
            rows = rig.padded_rows(NUM_ROWS, dead, seed=index)
            results = [
                gradient(engine, rig.mini_batch(rows, dynamic=dynamic, jagged=jagged), loss)
                for engine in (own, skipping)
            ]
            (wanted, _, all_of), (got, output, ran) = results
            metrics = values(output.get("metrics", {}))
            found.append((mode, number, rig.largest_difference(got, wanted), all_of, ran, metrics))
    return found


@pytest.mark.parametrize("layout", [{}, {"pipeline": 2}, {"tensor": 2}, {"pipeline": 2, "virtual": 2}], ids=str)
def test_gradient_equals_verls_own(pool: Pool, layout: dict) -> None:
    """The gradient equals verl's own in every loss_agg_mode, and fewer micro-batches run; DP2, PP2, TP2, interleaved."""
    for rank in pool.run(2, differences, timeout_s=120, **layout):
        assert max(row[2] for row in rank) < TOLERANCE
        for mode, number, _, dense, ran, metrics in rank:
            assert ran <= dense, (mode, number)
            if metrics:
                assert (metrics["skip/executed_share"] == 1.0) == (not DEAD[number])
        assert sum(row[4] for row in rank) < 0.8 * sum(row[3] for row in rank)
