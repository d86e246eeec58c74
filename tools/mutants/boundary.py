"""Lists the faults planted at the boundary: answers in texts, failed rewards, chat templates, and the refill."""

from __future__ import annotations

from mutants.table import Mutant

ANSWERS = (
    Mutant(
        name="first-mark-counts",
        file="megatron_rl/reward/final_answer.py",
        line="for mark in reversed(list(_MARK.finditer(text))):",
        becomes="for mark in _MARK.finditer(text):",
        fault="the first `####` of a completion is its answer, and not the last",
        tests=("tests/unit/reward/test_math.py::test_the_answer_is_what_stands_behind_the_mark",),
    ),
    Mutant(
        name="failed-judgement-ends-the-run",
        file="megatron_rl/reward/math.py",
        line="except Exception as error:  # noqa: BLE001  (RecursionError, sympy's own, what Python's eval raises)",
        becomes="except ValueError as error:",
        fault="a completion on which the library fails by another error than ValueError ends the run",
        tests=("tests/unit/reward/test_math.py::test_an_answer_that_the_library_fails_on_is_wrong_and_logged",),
    ),
    Mutant(
        name="all-failed-and-nobody-says-so",
        file="megatron_rl/rollout/reward_metrics.py",
        line="if errors.failed == errors.scored:",
        becomes="if errors.failed > errors.scored:",
        fault="a rollout whose rewards all fail goes on",
        tests=("tests/unit/rollout/test_reward_errors.py::test_counts_warning_and_end",),
    ),
    Mutant(
        name="refill-judges-the-penalty",
        file="megatron_rl/rollout/groups/refill.py",
        line='metric = next((name for name in functions if name in BUILT_IN), "reward")',
        becomes='metric = "shaped"',
        fault="dynamic sampling keeps groups of wrong answers that differ by the overlong penalty alone",
        tests=("tests/unit/reward/test_overlong.py::test_dynamic_sampling_keeps_the_groups_of_unequal_answers",),
    ),
)

TEMPLATES = (
    Mutant(
        name="end-of-a-turn-is-not-trained",
        file="megatron_rl/data/turns.py",
        line="return special[1]",
        becomes="return special[0]",
        fault="the token that ends an assistant's turn carries no loss",
        tests=("tests/unit/data/test_published_templates.py::test_texts_of_one_and_of_several_turns",),
    ),
    Mutant(
        name="end-of-a-turn-twice",
        file="megatron_rl/data/chat.py",
        line="return token_ids[1:] if stop_id in token_ids[:1] or ends_otherwise else token_ids",
        becomes="return token_ids",
        fault="an end that the template writes in another way behind a last turn stands twice behind a sampled one",
        tests=(
            "tests/unit/data/test_published_templates.py::test_what_follows_a_sampled_turn_equals_the_conversations_rendering",
        ),
    ),
    Mutant(
        name="row-gives-way-to-the-run",
        file="megatron_rl/data/conversations.py",
        line="variables[name] = value",
        becomes="variables.setdefault(name, value)",
        fault="a variable of the chat template for every row hides a row's own column",
        tests=(
            "tests/unit/data/test_conversations.py::test_a_prompt_equals_the_templates_rendering_with_the_rows_columns",
        ),
    ),
)

BOUNDARY = (*ANSWERS, *TEMPLATES)
