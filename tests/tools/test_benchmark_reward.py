"""Checks the refusals of tools/benchmarks/reward_pool.py, the faults that it finds, and the whole of it in small."""

import json
import math
import pathlib
from dataclasses import replace

import pytest
import reward_pool as benchmark_reward
from reward_functions import value_of
from reward_pool import SAID, draw_kinds, faults_in, hang_seconds, make_rollouts, math_rollouts, parse

from megatron_rl.reward.function import Outcome
from tests.patience import patient
from tests.tools import words

pytestmark = pytest.mark.process

ROWS = [{"question": f"{i} and {i}?", "answer": f"{i} and {i} is {2 * i}.\n#### {2 * i:,}"} for i in (0, 7, 600)]


def test_kinds_are_as_many_as_asked_for_and_half_of_the_math_answers_are_right() -> None:
    given = parse(["--samples", "1000", "--raising", "0.002", "--hanging", "0.01", "--killing", "0.1"])
    kinds = draw_kinds(given)
    assert {kind: kinds.count(kind) for kind in kinds} == {"answer": 888, "raise": 2, "hang": 10, "kill": 100}
    assert kinds == draw_kinds(given)
    assert len(set(draw_kinds(parse(words("--samples 9 --raising 1 --hanging 0 --killing 0"))))) == 1
    given = parse(["--math-samples", "7", "--group-size", "4"])
    rollouts, wanted = math_rollouts(ROWS, 1, given)
    assert [x.text.rpartition("#### ")[2] for x in rollouts] == ["1200", "12001", "1200", "1200111", "0", "01", "0"]
    assert wanted == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0]


def test_every_wrong_outcome_is_found() -> None:
    kinds = ["answer", "raise", "answer", "hang", "kill", "answer"]
    rollouts = make_rollouts(kinds, 2, "unused")
    values = [value_of(x.prompt.text, x.text, x.response_ids, x.prompt.columns["answer"]) for x in rollouts]
    good = [Outcome(error=f"…{SAID[kind]} …") if kind in SAID else Outcome(value=value)
            for kind, value in zip(kinds, values, strict=True)]
    assert faults_in(rollouts, kinds, good) == []
    assert len({outcome.value for outcome in good}) == 4  # three values of their own, and None
    swapped = [good[2], *good[1:2], good[0], *good[3:]]
    assert [fault.split()[0] for fault in faults_in(rollouts, kinds, swapped)] == ["0@0#0", "1@0#0"]
    for place, kind in enumerate(kinds):
        other = "kill" if kind == "raise" else "raise"
        for wrong in (Outcome(), Outcome(value=1.0), Outcome(error=SAID[other]), replace(good[place], value=2.0)):
            (fault,) = faults_in(rollouts, kinds, [*good[:place], wrong, *good[place + 1 :]])
            assert fault.startswith(rollouts[place].sample_id)


def test_seconds_of_a_hang_run_from_its_first_call_to_its_last_kill() -> None:
    calls = "7 3 10.0\n9 4 10.5\n8 3 11.2\n7 5 20.0\n"
    found = hang_seconds(calls, [(7, 11.0), (9, 11.5), (8, 12.2), (7, 21.5), (2, 30.0)])
    assert found == pytest.approx([2.2, 1.0, 1.5])  # process number 7 was given out twice
    assert math.isnan(hang_seconds("7 3 10.0\n", [])[0])


@pytest.mark.long(seconds=15)
def test_the_whole_in_small(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    sizes = "--samples 50 --group-size 4 --workers 2 --raising 0.02 --hanging 0.02 --killing 0.02"
    folders = f"--deadline {patient(2)} --data {tmp_path} --math-samples 12 --repeats 1 --json {tmp_path}/found.json"
    assert benchmark_reward.main(words(f"{sizes} {folders}")) == 0
    written = json.loads((tmp_path / "found.json").read_text())["parts"]
    table = written["faults"]["table"]
    assert [table[name] for name in ("samples", "raising", "hanging", "killing", "wrong answers")] == [50, 1, 1, 1, 0]
    # The hang costs one start where its group was cut for another's fault and two where not; the kill two or three.
    assert 2 + 1 + 2 <= table["workers started"] <= 2 + 2 + 3
    median, worst = (table[f"{which} seconds of a hanging sample"] for which in ("median", "worst"))
    assert 1.0 < median == worst <= table["seconds"] + 0.1
    assert written["math_verify"]["table"]["wrong answers"] == 0 and written["math_verify"]["table"]["ratio"] > 0
    assert "workers started" in capsys.readouterr().out


def test_a_wrong_answer_ends_with_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(benchmark_reward, "value_of", lambda *row: 0.5)
    assert benchmark_reward.main(["--samples", "8", "--workers", "1"]) == 1
    assert "0@0#0 has the value" in capsys.readouterr().out
