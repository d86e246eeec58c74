"""A run that is ended and started again with the same command equals the uninterrupted one, bitwise."""

import json

import pytest

from megatron_rl.checkpoint.folder import whole_checkpoints
from tests.pairwise import quick
from tests.runs.command import SAVED, SHARDED_KL, WARM, apart, assert_same_run

RUNS = {"PP2-warmup": ("parallel.pipeline=2", *WARM), "DP2-sharded-kl": SHARDED_KL,
        "TP2-calibrated": ("parallel.tensor=2", "plan.calibrate=true")}
REWARD = """
from tests.reward_functions import parity

def score(prompts, completions, completion_ids, answer, **columns):
    assert all(isinstance(gold, str) for gold in answer)
    return parity(prompts, completions, completion_ids)
"""


@pytest.mark.parametrize("name", quick(RUNS, "PP2-warmup", "TP2-calibrated"))
def test_a_run_in_two_parts_equals_the_whole_one(made, tmp_path, name):
    """With ``plan.calibrate`` plans follow measured times: equal to rounding, not to the bit."""
    whole = made(2, *SAVED, *RUNS[name], "train.num_rollouts=2")
    for rollouts in (1, 2):
        made.into(tmp_path, 2, *SAVED, *RUNS[name], f"train.num_rollouts={rollouts}")
        if rollouts == 1:  # a run killed after its checkpoint has written more
            with (tmp_path / "completions.jsonl").open("a") as file:
                file.write('{"source": "train"}\n{"source": "tr')
    assert whole_checkpoints(tmp_path / "checkpoints") == whole_checkpoints(whole / "checkpoints") == [0, 1, 2]
    if "calibrate" in name:
        assert apart(whole, tmp_path) < 1e-4
        return
    assert_same_run(whole, tmp_path)
    assert [len((whole / name).read_text().splitlines()) for name in ("completions.jsonl", "trace.jsonl")] == [2 * 4, 2]


def test_a_mixture_in_two_parts_equals_the_whole_run(made, arithmetic, tmp_path):
    """Two files of two forms, three prompts of four from the first, scored by the function of a file."""
    rows = [json.loads(line) for line in (arithmetic / "train.jsonl").read_text().splitlines()]
    cells = [f'"{row["prompt"]}",{row["answer"]}' for row in rows[:7]]
    (tmp_path / "a.csv").write_text("\n".join(["prompt,answer", *cells]) + "\n")
    (tmp_path / "b.json").write_text(json.dumps(rows[7:20]))
    (tmp_path / "rewards.py").write_text(REWARD)
    data = f"data.train=[{tmp_path / 'a.csv'},{tmp_path / 'b.json'}]"
    whole = made(1, *SAVED, data, "data.weights=[3,1]", f"reward.functions={tmp_path / 'rewards.py'}:score")
    assert_same_run(whole, made.again(whole, 1))
    assert (whole / "completions.jsonl").read_text()
