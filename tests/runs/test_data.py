"""Runs on data of several forms: a mixture resumes to the bit, and a row that cannot be trained ends the start."""

from __future__ import annotations

import json

import pytest
import torch

from tests.runs.command import SAVED, arguments, command_line, rows_of, timeless, weights_of_last

REWARD = """
from tests.reward_functions import parity

def score(prompts, completions, completion_ids, answer, **columns):
    assert all(isinstance(gold, str) for gold in answer)
    return parity(prompts, completions, completion_ids)
"""


def test_a_mixture_in_two_parts_equals_the_whole_run(pool, arithmetic, tmp_path):
    """Two files of two forms, three prompts of four from the first, scored by the function of a file."""
    rows = [json.loads(line) for line in (arithmetic / "train.jsonl").read_text().splitlines()]
    cells = [f'"{row["prompt"]}",{row["answer"]}' for row in rows[:7]]
    (tmp_path / "a.csv").write_text("\n".join(["prompt,answer", *cells]) + "\n")
    (tmp_path / "b.json").write_text(json.dumps(rows[7:20]))
    (tmp_path / "rewards.py").write_text(REWARD)
    data = [
        f"data.train=[{tmp_path / 'a.csv'},{tmp_path / 'b.json'}]",
        "data.weights=[3,1]",
        f"reward.functions={tmp_path / 'rewards.py'}:score",
    ]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder, rollouts in ((whole, 2), (parts, 1), (parts, 2)):
        given = arguments(arithmetic, folder, *SAVED, *data, f"train.num_rollouts={rollouts}")
        results = pool.run(1, command_line, given, timeout_s=120)
        assert [code for code, _ in results] == [0], results
    one, two = weights_of_last(whole), weights_of_last(parts)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert [timeless(row) for row in rows_of(whole)] == [timeless(row) for row in rows_of(parts)]
    completions = (whole / "completions.jsonl").read_text()
    assert completions == (parts / "completions.jsonl").read_text() and completions


@pytest.mark.parametrize(
    ("name", "content", "overrides", "words"),
    [
        (
            "d.jsonl",
            '{"prompt": "1+1=", "answer": "2"}\n\n{"prompt": "1+2="}\n',
            [],
            "row 1 (PATH:3) has no column 'ans",
        ),
        ("d.csv", "prompt,answer\n1+1=,2\n1+2=,\n", ["reward.functions=arithmetic"], "row 1 (PATH:3): column 'answer'"),
        ("d.csv", "prompt,gold\n1+1=,2\n", ["reward.functions=arithmetic"], "its columns are 'prompt', 'gold'"),
    ],
)
def test_a_row_without_its_answer_ends_the_start(pool, arithmetic, tmp_path, name, content, overrides, words):
    path = tmp_path / name
    path.write_text(content)
    given = arguments(arithmetic, tmp_path / "run", f"data.train={path}", *overrides)
    ((code, said),) = pool.run(1, command_line, given, timeout_s=60)
    assert code == 2 and words.replace("PATH", str(path)) in said, said
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
