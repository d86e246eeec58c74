"""planning/plan.py under lockstep: ranks that share experts run equally many, by finer cuts first, then by fillers."""

import numpy as np
import pytest

from megatron_rl.planning.plan import PlanRules
from megatron_rl.planning.tokens import padded_lengths
from megatron_rl.types import StepKind, StepPlan
from tests.unit.planning.lockstep import assert_lockstep, one_step


def layout(signal: list[int], rules: PlanRules, *, lengths: list[int] | None = None,
           drops: bool = True) -> tuple[StepPlan, list[str]]:
    """Return the plan of one mini-batch (of 8 samples) and each rank's micro-batches, "0,4 7*" with * for a filler."""
    tokens = np.array(lengths or [10] * 8)
    one = one_step(tokens, rules, signal=np.isin(np.arange(len(tokens)), signal), drops=drops)
    assert_lockstep(one, rules, padded_lengths(tokens, rules.pad_multiple))
    names = ([",".join(map(str, m.samples)) + "*" * m.filler for m in one.microbatches(i)]
             for i in range(rules.data_size))
    return one, [" ".join(rank) for rank in names]


@pytest.mark.parametrize(("lockstep", "multiple", "ranks", "silent"), [
    (1, 1, ["5", "", "", ""], 3),
    (2, 1, ["5", "5*", "", ""], 2),
    (4, 1, ["5", "5*", "5*", "5*"], 0),
    (2, 2, ["5 5*", "5* 5*", "", ""], 2),
    (4, 3, ["5 5* 5*"] + ["5* 5* 5*"] * 3, 0),
])
def test_one_survivor_keeps_its_block_in_lockstep(lockstep: int, multiple: int, ranks: list[str], silent: int) -> None:
    """Under VPP each rank that runs has a whole group: as many micro-batches as pipeline stages, never fewer."""
    one, found = layout([5], PlanRules(data_size=4, lockstep_ranks=lockstep, microbatch_multiple=multiple))
    assert found == ranks and one.silent_ranks == silent and one.num_fillers == sum(r.count("*") for r in ranks)


def test_fewer_survivors_than_ranks_wake_as_few_blocks_as_they_can() -> None:
    rules = PlanRules(data_size=4, lockstep_ranks=2)
    assert layout([2, 7], rules)[1] == ["2", "7", "", ""]
    assert layout([2, 5, 7], rules, lengths=[10, 10, 30, 10, 10, 20, 10, 9])[1] == ["2", "5", "7", "7*"]


@pytest.mark.parametrize("static", [None, 1])
def test_survivors_on_one_rank_only(static: int | None) -> None:
    """Without ``repack`` the rows of the dense plan that have a survivor run, its fillers too; other blocks do not."""
    rules = PlanRules(data_size=4, lockstep_ranks=2, max_tokens=10, samples_per_microbatch=static, repack=False)
    one, found = layout([3, 7], rules, lengths=[1, 1, 10, 10, 1, 1, 9, 9] if static else [10] * 8)
    assert found == ["", "", "2 6", "3 7"] and one.silent_ranks == 2 and one.num_fillers == 0
    one, found = layout([6], rules, lengths=[10, 10, 10, 10, 9, 10, 10])
    assert found == (["", "", "6", "4*"] if static else ["5", "6", "", ""])
    assert one.ran.tolist() == ([6] if static else [5, 6]) and one.microbatches_dropped == 6


def test_nothing_survives_and_no_filler_runs_and_blocks_that_do_not_divide_are_refused() -> None:
    one, found = layout([], PlanRules(data_size=4, lockstep_ranks=4, microbatch_multiple=2))
    assert found == [""] * 4 and one.kind is StepKind.GHOST and (one.silent_ranks, one.num_fillers) == (0, 0)
    with pytest.raises(ValueError, match="6 data-parallel ranks do not divide into blocks of lockstep_ranks=4"):
        PlanRules(data_size=6, lockstep_ranks=4)


def test_dense_run_gets_fillers_too() -> None:
    """Five samples on two ranks, each its own micro-batch, are 3 against 2, and neither rank has one to cut."""
    rules = PlanRules(data_size=2, lockstep_ranks=2, max_tokens=10)
    one, found = layout([], rules, lengths=[10] * 5, drops=False)
    assert found == ["0 2 4", "1 3 0*"] and one.num_fillers == 1
    dropped, found = layout([0], rules, lengths=[10] * 5)
    assert found == ["0", "0*"] and dropped.microbatches_dropped == 4  # of 6, fillers counted


@pytest.mark.parametrize(
    ("lockstep", "lengths", "ranks"),
    [(1, [15, 11, 10, 5], ["0,3", "1 2"]), (2, [15, 11, 10, 5], ["0 3", "1 2"]), (2, [20, 12, 9], ["0 2*", "1 2"])],
)
def test_block_cuts_its_own_samples_before_it_fills(lockstep: int, lengths: list[int], ranks: list[str]) -> None:
    """20 tokens against 21 under a cap of 20 are one micro-batch against two; a single sample is not cut."""
    rules = PlanRules(data_size=2, lockstep_ranks=lockstep, max_tokens=20)
    assert layout([], rules, lengths=lengths, drops=False)[1] == ranks


def test_cut_that_greedy_cannot_fit_takes_its_block_along() -> None:
    """Rank 0 has 9, 4, 7, 4, two micro-batches of 12, but longest first ends at 13 and takes three; rank 1 follows."""
    lengths = [9, 4, 7, 9, 5, 4, 6, 3]
    alone, together = (PlanRules(data_size=2, lockstep_ranks=n, max_tokens=12) for n in (1, 2))
    assert layout([], alone, lengths=lengths, drops=False)[1] == ["0 1,5 2", "3,7 4,6"]
    assert layout([], together, lengths=lengths, drops=False)[1] == ["0 1,5 2", "3 4,7 6"]
