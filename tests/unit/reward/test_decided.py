"""``reward.decided``: early ends leave the expected gradient as it is; what the function gets, and its errors."""

from __future__ import annotations

import itertools
import math
import pathlib
import re
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_rl.algorithm.early_ends import changed_terms
from megatron_rl.algorithm.estimators import Rewards, rloo
from megatron_rl.config import RewardConfig, load_config
from megatron_rl.errors import ConfigError, RewardError
from megatron_rl.reward import Reward
from megatron_rl.reward.decided import Decided, resolve_decided
from megatron_rl.rollout.engines.early_end import first_end
from megatron_rl.types import Prompt
from megatron_rl.validate import objective, validate_config
from tests import decided_functions
from tests.patience import patient

HERE = "tests.decided_functions"
PROMPT = Prompt(prompt_id="0@0", text="3+4=", token_ids=(5, 13), columns={"prompt": "a row's own", "answer": "7"})
STOP, VOCAB, MOST = 0, 4, 4
Sequences = list[tuple[int, ...]]


def decided_of(function: str, every: int = 1, **settings) -> Decided:
    settings |= {"decided": f"{HERE}:{function}", "decided_every_tokens": every}
    return Decided(RewardConfig(functions=("arithmetic",), **settings), lambda ids: "".join(map(str, ids)))


# ---- the expected gradient, by enumeration -----------------------------------------------------------------------


def sequences() -> Sequences:
    """Return every response over four tokens: to the stop token, or to four tokens."""
    bodies = itertools.chain(*(itertools.product(range(1, VOCAB), repeat=n) for n in range(MOST)))
    full = list(itertools.product(range(1, VOCAB), repeat=MOST))
    return [(*body, STOP) for body in bodies] + full


def logprobs_of(table: torch.Tensor, ids: Sequence[int]) -> list[torch.Tensor]:
    """Return the log-prob of each token under a table of logits, one row for each beginning of a response."""
    rows = [sum(token * VOCAB**place for place, token in enumerate(ids[:n])) + VOCAB**MOST * n for n in range(len(ids))]
    return [torch.log_softmax(table[row % len(table)], dim=0)[token] for row, token in zip(rows, ids, strict=True)]


def expected_gradient(
    reward: Callable[[tuple[int, ...]], float], end: Callable[[tuple[int, ...]], int | None], by_length: bool = False
) -> tuple[np.ndarray, float]:
    """Return the gradient of the token sum under ``rloo``, expected over all groups of two, and the expected tokens.

    end: after how many tokens a whole response ends early.
    by_length: whether the tokens of a sample are weighed by 1 / its length, as ``sequence_mean`` does.
    """
    table = torch.randn(997, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    # Whole responses with one beginning are one outcome, whose probability is theirs together.
    outcomes: dict[tuple[int, ...], float] = {}
    rewards: dict[tuple[int, ...], float] = {}
    for whole in sequences():
        ended = whole[: end(whole)]
        chance = math.exp(sum(x.item() for x in logprobs_of(table, whole)))
        outcomes[ended], rewards[ended] = outcomes.get(ended, 0.0) + chance, reward(ended)
    assert abs(sum(outcomes.values()) - 1) < 1e-12
    pairs = list(itertools.product(outcomes, repeat=2))
    values, group = np.array([rewards[ids] for pair in pairs for ids in pair]), np.repeat(np.arange(len(pairs)), 2)
    advantages = rloo(Rewards(values=values, group=group, included=np.ones(len(group), dtype=bool))).reshape(-1, 2)
    weights = dict.fromkeys(outcomes, 0.0)  # of the gradient of each outcome's log-prob
    for pair, A in zip(pairs, advantages.tolist(), strict=True):
        for ids, advantage in zip(pair, A, strict=True):
            weights[ids] += outcomes[pair[0]] * outcomes[pair[1]] * advantage / (len(ids) if by_length else 1)
    loss = -sum(weight * sum(logprobs_of(table, ids)) for ids, weight in weights.items())
    (gradient,) = torch.autograd.grad(loss, table)
    return gradient.numpy(), sum(chance * len(ids) for ids, chance in outcomes.items())


@pytest.mark.parametrize("every", [1, 2])
def test_the_expected_gradient_of_early_ends_equals_that_of_whole_responses(every: int) -> None:
    """Equal for a token sum and a right function; another under a wrong one, or a weight by length."""

    def reward(ids: tuple[int, ...]) -> float:
        return decided_functions.has_three([], [], [ids], [""])[0]

    def ends_by(function: str) -> Callable[[tuple[int, ...]], int | None]:
        decided = decided_of(function, every)
        return lambda ids: first_end(decided, PROMPT, 0, ids)

    whole, tokens = expected_gradient(reward, lambda ids: None)
    early, fewer = expected_gradient(reward, ends_by("three_is_there"))
    assert np.abs(whole).max() > 1e-3 and fewer < 0.95 * tokens
    assert np.abs(early - whole).max() < 1e-12
    wrong, _ = expected_gradient(reward, ends_by("three_is_not_there"))
    assert np.abs(wrong - whole).max() > 1e-3
    means = [expected_gradient(reward, end, by_length=True)[0] for end in (lambda ids: None, ends_by("three_is_there"))]
    assert np.abs(means[0] - means[1]).max() > 1e-3


# ---- the function: its arguments and its errors ------------------------------------------------------------------


def test_the_function_gets_the_beginning_and_the_rows_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    got = []
    monkeypatch.setattr(decided_functions, "seen", lambda **given: bool(got.append(given)), raising=False)
    assert not decided_of("seen").ends(PROMPT, 2, (4, 1))
    assert got == [{"prompt": "3+4=", "completion": "41", "completion_ids": [4, 1], "answer": "7"}]


def test_a_sample_is_looked_at_after_multiples_below_its_own_end() -> None:
    asked = []
    early_end = SimpleNamespace(every_tokens=3, ends=lambda prompt, sample, ids: bool(asked.append(len(ids))))
    for length, whole, after, wanted in ((9, True, 0, [3, 6]), (9, False, 0, [3, 6, 9]), (9, False, 5, [6, 9]),
                                         (9, False, 6, [9]), (2, False, 0, []), (10, True, 3, [6, 9])):
        asked.clear()
        assert first_end(early_end, PROMPT, 0, range(length), after=after, whole=whole) is None
        assert asked == wanted


@pytest.mark.parametrize(("function", "said"), [
    ("fails", r"failed; mend it:\n(.*\n)*LookupError: no verdict"),
    ("leaves", r"failed; mend it:\n(.*\n)*SystemExit: 0"),
    ("returns_a_number", r"returned 1\.0, a float; return True"),
])
def test_an_error_names_function_sample_and_place(function: str, said: str) -> None:
    place = re.escape(f"reward.decided='{HERE}:{function}' on sample 0@0#2 after 2 tokens")
    with pytest.raises(RewardError, match=f"{place} {said}"):
        decided_of(function).ends(PROMPT, 2, (4, 1))


def test_a_call_that_does_not_return_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, let_go = threading.Event(), threading.Event()

    def hangs(**given) -> bool:
        entered.set()
        return let_go.wait(patient(60))

    monkeypatch.setattr(decided_functions, "hangs", hangs, raising=False)
    decided = decided_of("hangs", deadline_s=0.1)
    thread = threading.Thread(target=decided.ends, args=(PROMPT, 0, (4,)), daemon=True)
    thread.start()
    assert entered.wait(patient(60))
    with pytest.raises(RewardError, match=r"0@0#1 after 1 tokens: .* not returned for reward\.deadline_s=0\.1 s"):
        decided.ends(PROMPT, 1, (4,))
    let_go.set()
    thread.join(patient(60))
    assert not thread.is_alive() and decided.ends(PROMPT, 1, (4,))


@pytest.mark.parametrize(("name", "said"), [
    (f"{HERE}:three_is_their", "has no 'three_is_their'; the nearest it has is 'three_is_there'"),
    (f"{HERE}:waits", "asynchronous"),
    (f"{HERE}:takes_little", "does not take 'prompt'"),
    ("arithmetic", "is not known"),
    ("math:pi", "is a float"),
])
def test_a_function_that_cannot_be_asked_is_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"reward.decided='?{re.escape(name)}.*{said}"):
        resolve_decided(name)


def test_a_parameter_without_default_is_a_column_of_every_row() -> None:
    config = RewardConfig(functions=("arithmetic",), decided=f"{HERE}:needs_difficulty")
    reward = Reward(config)
    assert [column.name for column in reward.required_columns] == ["answer", "difficulty"]
    assert "is asked after every 16 tokens" in reward.recognised[-1]


def test_the_pages_example_keeps_the_contract() -> None:
    """Every beginning that docs/your-own.md's function calls decided has the score of the whole text."""
    page = (pathlib.Path(__file__).parents[3] / "docs" / "your-own.md").read_text(encoding="utf-8")
    own: dict = {}
    exec(re.findall(r"```python\n(.*?)```", page.partition("## Early ends")[2], re.DOTALL)[0], own)
    parts, decided, scores = ("Answer:", " 7", " 42", "\n", "\nAnswer: 7", "so"), 0, set()
    for chosen in itertools.chain(*(itertools.product(parts, repeat=n) for n in range(1, 6))):
        texts = ["".join(chosen[:n]) for n in range(1, len(chosen) + 1)]
        *beginnings, whole = own["score"](None, texts, None, ["7"] * len(texts))
        scores.add(whole)
        for text, score in zip(texts, beginnings, strict=False):
            if own["decided"]("", text, [], answer="7"):
                assert score == whole, (text, texts[-1])
                decided += 1
    assert decided > 1000 and scores == {0.0, 1.0}


# ---- what early ends cannot be combined with, and what they change -----------------------------------------------

GIVEN = ["reward.functions=[arithmetic]", f"reward.decided={HERE}:if_even", "loss.reduction=token_sum"]


@pytest.mark.parametrize("setting", [
    "reward.overlong_buffer_tokens=8", "loss.mask_truncated=true", "rollout.servers=[http://a:1]",
    "environment.name=calculator", "rollout.bitwise=true", "reward.functions=[]",
])
def test_what_early_ends_cannot_be_combined_with_is_refused_by_name(setting: str) -> None:
    validate_config(load_config(None, GIVEN), objective.early_ends)
    more = ["rollout.engine=vllm", "rollout.num_engines=null"] if "servers" in setting else []
    said = "an environment" if "environment" in setting else setting.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"reward\.decided=.*{said}.* set reward\.decided=null"):
        validate_config(load_config(None, [*GIVEN, *more, setting]), objective.early_ends)


def test_settings_that_weigh_by_length_or_by_every_token_are_named() -> None:
    assert changed_terms(load_config(None, GIVEN)) == ()
    for setting in ("loss.reduction=sequence_mean", "loss.entropy_coefficient=0.01", "loss.kl_coefficient=0.1",
                    "loss.policy=gspo", "correction.mode=sequence_mask", "advantage.estimator=gae"):
        (term,) = changed_terms(load_config(None, [*GIVEN, setting]))
        assert term.startswith(f"{setting}: ")
