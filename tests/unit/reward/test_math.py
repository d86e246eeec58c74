r"""reward/math.py: a completion's answer is what stands behind its format's mark; judging it takes bounded time."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import megatron_rl.reward.math as math_module
from megatron_rl.config import RewardConfig
from megatron_rl.errors import RewardError
from megatron_rl.reward import Reward
from megatron_rl.reward.final_answer import number_text
from megatron_rl.reward.math import math_verify
from tests.patience import HANG_S, patient
from tests.unit.reward.rig import groups_of

TOWERS = [f"\\boxed{{9^{{9^{{9^{{9}}}}}}+{i}}}" for i in range(4)]

# Each line: a gold answer; completions that are right; completions that are wrong.
JUDGED = r"""
72;; #### 72| #### 72 dollars| #### $72| #### 72.|####72| #### **72** eggs;; #### 72\n#### 71| #### | I do not know
72;; #### 72\n\nThat took 3 steps, 2 of them sums| #### 72 (that is, 8 times 9)| #### 72\n#### 1. Check: 8;; #### -72
72;; #### 72\n\n#### Check\n8*9=72, 2 factors| #### Answer: 72| #### x = 72;; #### 71\n\nThat took 72 steps| #### 72^{2}
72;; #### Step 3: add\n70+2\n#### 72| #### \boxed{72}\nin 3 steps| #### 144/2 eggs| #### 72%;; \boxed{72} or \boxed{
72;; \boxed{71}\n#### 72| \boxed{72}\n\nThe final answer is 3 steps away;; \boxed{72}\n#### 71| #### 72\n\boxed{71}
72;; \boxed{71}\n\boxed{72}| \fbox{72}| \boxed 72.;; \boxed{71}. The final answer is 72| \boxed{72 xyz}| \boxed{\frac{
72;; \boxed{72 dollars}| \boxed{72 cm^2}| \boxed{€72}| \boxed{\text{\$}72};; \boxed{72x}| \boxed{72 \text{ or } 71}
72;; #### 1. Setup\nIt is \boxed{72}| \boxed{72}\n#### Check\n3 steps| ### Final Answer\n72 eggs\nIn 3;; 71
worked out in 3\n#### -3;; #### -3\n\boxed{5}| \boxed{-3}| #### -3. That took 5 steps;; so -3.\n#### | #### 3
1000;; #### 1,000| \boxed{1{,}000}| \boxed{1\,000}| \boxed{1 000}| #### $1,000.00 a year;; #### 1,00
\$18.90;; \boxed{18.90}| #### $18.9 each| The answer is \$18.90| 18.90 dollars;; 18| \boxed{18,90}| #### 1890
\$32,\!348;; \boxed{32348}| \boxed{\$32,\!348}| #### 32,348;; \boxed{32}
0.5;; so \boxed{\frac{1}{2}}| #### $\frac{1}{2}$ cup| #### 1/2 of the 3 cakes| \boxed{50\%};; #### 1| #### 2
\frac{1}{2};; The answer is $\frac{2}{4}$.| \boxed{1/2}| #### 0.5;; \boxed{2}
$2\frac{1}{2}$;; \boxed{2.5}| #### 2 1/2 cups| \boxed{\frac52};; \boxed{2}| #### 2
10%;; #### 10% of 50| \boxed{0.1}| \boxed{10\%};; #### 50
x+1;; so \boxed{1+x}| #### x+1| #### 1+x;; 1| \boxed{1}
1, 2;; $\boxed{1}$ and $\boxed{2}$| \boxed{2, 1}| #### 1, 2;; \boxed{2}
"""


def test_the_answer_is_what_stands_behind_the_mark():
    for line in JUDGED.strip().splitlines():
        gold, *given = line.replace("\\n", "\n").split(";; ")
        for expected, texts in zip((1.0, 0.0), given, strict=True):
            for text in texts.split("| "):
                assert math_verify([], [text], [], [gold]) == [expected], (text, gold)


def test_a_number_is_read_as_python_reads_it():
    for text, number in {
        "\\$32,\\!348": "32348", "-1,000.50 dollars": "-1000.50", "−.5": "-0.5", "12,34,567": "1234567", "-\\$5": "-5",
        "007": "7", "1/2": None, "2x": None, "1001_2": None, "6:30": None, "3 pi": None, "9" * 5000: None, "": None,
    }.items():  # fmt: skip
        assert number_text(text) == number, text


def test_gold_that_does_not_parse_is_an_error():
    for gold in ("", " ", "####", "{{{"):
        with pytest.raises(ValueError, match="is nothing that math-verify can parse"):
            math_verify([""], ["1"], [[]], [gold])
    with pytest.raises(RewardError, match="(?s)sample 1@0#0 .*gold answer '{{{' is nothing that math-verify can parse"):
        rollouts = groups_of(["1"], ["2"], answer=lambda number: ("1", "{{{")[number])
        Reward(RewardConfig(functions=("math_verify",))).score(rollouts)


def test_an_answer_that_takes_too_long_is_wrong_and_logged_and_the_call_is_bounded(monkeypatch, caplog):
    monkeypatch.setattr(math_module, "QUICK_S", 0.1)
    monkeypatch.setattr(math_module, "PATIENT_S", 0.2)
    monkeypatch.setattr(math_module, "BATCH_S", 0.3)
    began = time.monotonic()
    assert math_verify([], ["1", *TOWERS, *TOWERS, "#### 7"], [], ["7"] * 10) == [0.0] * 9 + [1.0]
    # 0.1 s for each of six texts and 0.3 s together; a host under load may stop the process for longer
    assert time.monotonic() - began < patient(5)
    (record,) = caplog.records
    assert "could not judge within 0.2 s each and 0.3 s in all: 4 of 6 completions" in record.getMessage()
    assert "9^{9}}}+0" in record.getMessage()


def test_an_answer_that_the_library_fails_on_is_wrong_and_logged(monkeypatch, caplog):
    def fail(text, **_):
        raise RecursionError(f"too deep: {text}") if "deep" in text else ValueError("no text of mine")

    monkeypatch.setattr(math_module, "parse", fail)
    assert math_verify([], ["\\boxed{deep}", "a", "b", "#### 7"], [], ["7"] * 4) == [0.0, 0.0, 0.0, 1.0]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and "RecursionError" in said[0] and "1 of 4 completions" in said[0]
    assert "no text of mine" in said[1] and "2 of 4 completions; each counts as wrong" in said[1]


def test_a_slow_answer_has_time_once_the_others_are_judged(monkeypatch):
    order, judge = [], math_module._score

    def slow(completion, gold):
        order.append(completion)
        while completion == "#### 7" and order.count(completion) == 1:
            pass
        return judge(completion, gold)

    monkeypatch.setattr(math_module, "_score", slow)
    assert math_verify([], ["#### 7", "#### 8"], [], ["7", "8"]) == [1.0, 1.0]
    assert order == ["#### 7", "#### 8", "#### 7"]


def test_outside_the_main_thread_says_so():
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="main thread only"):
        pool.submit(math_verify, [""], ["1"], [[]], ["1"]).result(patient(HANG_S))
