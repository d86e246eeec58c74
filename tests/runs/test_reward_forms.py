"""The page docs/coming-from.md on a tiny model: verl's and TRL's functions and data train the run of lists."""

import pathlib
import re
import shutil

import pytest

from tests.runs.command import assert_same_run, firsts_of

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "coming-from.md"


@pytest.mark.long
def test_the_forms_of_verl_and_trl_train_the_run_of_lists(made, tmp_path, monkeypatch):
    """Each in the page's two settings; the weights and the metrics are those of the function of lists, to the bit."""
    monkeypatch.chdir(tmp_path)
    for text, name in re.findall(r"```python\n(# (\w+\.py)\n.*?)^```", PAGE.read_text(), re.S | re.M):
        pathlib.Path(name).write_text(text)
        if name.endswith("_data.py"):
            exec(compile(text, name, "exec"), {})
    started = made(1, "sft.steps=60", "sft.samples_per_step=32", "train.num_rollouts=0", "optimizer.lr=1e-2")
    shutil.copytree(max((started / "checkpoints").glob("step_*/hf")), "model")
    pathlib.Path("model/chat_template.jinja").write_text("{% for turn in messages %}{{ turn.content }}{% endfor %}")
    commands = re.findall(r"reward\.functions=\./(\w+\.py:\w+) data\.train=(\S+)", PAGE.read_text())
    assert [name for name, _ in commands] == ["verl_reward.py:compute_score", "trl_reward.py:accuracy",
                                              "list_reward.py:score"]  # fmt: skip
    runs = []
    for number, (name, data) in enumerate(commands):
        runs.append(tmp_path / f"run{number}")
        given = (f"model.hf_path={tmp_path}/model", f"data.train={tmp_path}/{data}", "optimizer.lr=1e-2")
        made.into(runs[-1], 1, *given, f"reward.functions=[{tmp_path}/{name}]")
    *others, lists = runs
    assert any(row["reward/mean"] > 0 for row in firsts_of(lists))
    for run in others:
        assert_same_run(lists, run, "reward/", files=("trace.jsonl",))
        assert [row["reward/mean"] for row in firsts_of(run)] == [row["reward/mean"] for row in firsts_of(lists)]
