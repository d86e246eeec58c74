"""A run with ``reward.decided`` beside the same run without; ``megatron-rl check-decided`` on whole rollouts."""

from __future__ import annotations

import pathlib

import pytest

from megatron_rl.commands import check_decided
from megatron_rl.observability.saved_rollouts import read_rollout
from tests.runs.command import firsts_of

FUNCTIONS = "tests.decided_functions"
WHOLE = (f"reward.functions=[{FUNCTIONS}:has_three]", "metrics.save_rollouts=true", "loss.reduction=token_sum")
EVERY = "reward.decided_every_tokens=1"


@pytest.fixture
def whole(made) -> pathlib.Path:
    return made(1, *WHOLE)


def samples_of(run: pathlib.Path, number: int = 1) -> dict[str, tuple]:
    """Return {sample's id: (tokens, end, reward)} of a saved rollout."""
    return {f"{group['prompt_id']}#{x['sample']}": (x["ids"], x["finish_reason"], x["reward"])
            for group in read_rollout(run, number)["groups"] for x in group["samples"]}


@pytest.mark.process
def test_a_runs_first_rollout_equals_the_whole_one_cut_by_hand_with_the_same_rewards(made, whole, tmp_path) -> None:
    (said,) = made.into(tmp_path / "run", 1, *WHOLE, f"reward.decided={FUNCTIONS}:three_is_there", EVERY)
    assert f"reward.decided='{FUNCTIONS}:three_is_there' is asked after every 1 tokens" in said
    assert "changes the expected gradient" not in said  # which a token sum does not
    of_whole, early, cut = samples_of(whole), samples_of(tmp_path / "run"), 0
    for name, (ids, end, reward) in of_whole.items():
        length = ids.index(3) + 1 if 3 in ids else len(ids)
        wanted = (ids[:length], "decided", reward) if length < len(ids) else (ids, end, reward)
        assert early[name] == wanted
        cut += length < len(ids)
    assert 0 < cut < len(of_whole) == len(early)
    first, of_whole_run = firsts_of(tmp_path / "run")[0], firsts_of(whole)[0]
    assert first["rollout/decided_share"] == cut / len(early)
    assert first["rollout/tokens"] < of_whole_run["rollout/tokens"]
    assert first["reward/mean"] == of_whole_run["reward/mean"] and "rollout/decided_share" not in of_whole_run
    assert first["rollout/truncated_share"] == sum(end == "length" for _, end, _ in early.values()) / len(early)


def checked(run: pathlib.Path, capsys: pytest.CaptureFixture, *given: str) -> tuple[int, str]:
    code = check_decided.main([str(run), *given])
    said = capsys.readouterr()
    return code, said.out + said.err


def test_a_replay_accepts_a_right_function_and_counts_what_it_saves(whole, capsys) -> None:
    code, said = checked(whole, capsys, f"reward.decided={FUNCTIONS}:three_is_there", EVERY)
    samples = [ids for number in (1, 2) for ids, *_ in samples_of(whole, number).values()]
    saved = sum(len(ids) - ids.index(3) - 1 for ids in samples if 3 in ids)
    ended = sum(3 in ids[:-1] for ids in samples)
    tokens = sum(map(len, samples))
    assert code == 0 and "BROKEN" not in said
    assert f"{len(samples):,} responses of {tokens:,} tokens: {ended:,} would have ended early" in said
    assert f"saves {saved:,} tokens ({saved / tokens:.1%})" in said


def test_a_replay_finds_a_wrong_function_with_the_samples(whole, capsys) -> None:
    """Wrong are the beginnings without token 3 of responses that hold it."""
    given = (f"reward.decided={FUNCTIONS}:three_is_not_there", EVERY, "--last", "1")
    code, said = checked(whole, capsys, *given)
    wrong = {name: ids.index(3) for name, (ids, *_) in samples_of(whole, 2).items() if 3 in ids[1:] and ids[0] != 3}
    assert code == 1 and len(wrong) > 1
    assert f"broken by {sum(wrong.values())} beginnings of {len(wrong)} samples" in said
    first = said.partition("BROKEN ")[2].split()[0]
    assert first in wrong and f"BROKEN {first} after 1 tokens: reward 0.0, whole 1.0; text …" in said


@pytest.mark.parametrize(("given", "said"), [
    ((), "reward.decided=null; name the function"),
    ((f"reward.decided={FUNCTIONS}:fails",), "LookupError: no verdict"),
    ((f"reward.decided={FUNCTIONS}:if_even", "reward.overlong_buffer_tokens=2"), "reward.overlong_buffer_tokens=2"),
    ((f"reward.decided={FUNCTIONS}:if_even", "--last", "0"), "--last=0 must be at least 1"),
    ((f"reward.decided={FUNCTIONS}:if_even", "data.train={other}"), "other data than data.train has now"),
])
def test_a_replay_that_cannot_be_made_says_why(whole, capsys, tmp_path, given, said) -> None:
    (tmp_path / "other.jsonl").write_text('{"prompt": "9+9=", "answer": "18"}\n' * 200)
    given = [x.replace("{other}", str(tmp_path / "other.jsonl")) for x in given]
    code, found = checked(whole, capsys, *given, EVERY)
    assert code == 2 and said in found


def test_a_folder_without_saved_rollouts_is_named(tmp_path, whole, capsys) -> None:
    assert "is no run's folder" in checked(tmp_path, capsys)[1]
    (tmp_path / "config.yaml").write_text((whole / "config.yaml").read_text())
    code, said = checked(tmp_path, capsys, f"reward.decided={FUNCTIONS}:if_even")
    assert code == 2 and "has no saved rollouts; run it with metrics.save_rollouts=true" in said
