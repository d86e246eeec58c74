"""The library example: a real step, a ghost, the weights, and a sentence where its argument is missing."""

from __future__ import annotations

import pathlib

from tests.workers.nursery import Nursery

SCRIPT = pathlib.Path(__file__).parents[2] / "examples" / "library" / "one_step.py"


def test_a_real_step_and_a_ghost_are_taken_and_the_weights_exported(nursery: Nursery, arithmetic: pathlib.Path) -> None:
    code, said = nursery.run_script(SCRIPT, str(arithmetic / "model"), timeout_s=60)
    assert code == 0, said
    real, ghost, weights = said.splitlines()[-3:]
    assert real.startswith("rank 0: REAL, gradient norm ") and real.endswith(", 0 samples dropped")
    assert ghost == "rank 0: GHOST, gradient norm 0.0000, 4 samples dropped"
    assert weights.endswith(" weights exported")


def test_without_a_model_it_says_how_it_is_called(nursery: Nursery) -> None:
    for arguments in ((), ("parallel.pipeline=2",)):
        code, said = nursery.run_script(SCRIPT, *arguments, timeout_s=60)
        assert code == 2 and "Traceback" not in said
        assert "The first argument is the folder of a Hugging Face model" in said and "torchrun" in said
