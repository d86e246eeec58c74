"""Which completions are recorded, that hostile text stays text, and that whole rollouts come back as written."""

import dataclasses
import gzip
import json
import logging
import math
import pathlib
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megatron_rl.config import MetricsConfig
from megatron_rl.observability import completions as recorded
from megatron_rl.observability import saved_rollouts as saved
from megatron_rl.observability.completions import best_to_worst, cut, read_completions, share_of_groups, visible
from megatron_rl.observability.metrics import MetricsWriter
from megatron_rl.types import Prompt, Rollout

HOSTILE = "\x1b[2J\x1b]0;owned\x07</pre><script>alert(1)</script>\r\x00\u202eton\u200b\u2028```\n<img src=x onerror=y>"
TEXTS = ["3 + 4 = 7", "naïve café, 5 €", "日本語\n\ttabs  and  spaces", "emoji 🙂🙂 end"]


def completion(**changes: object) -> recorded.Completion:
    texts = dict(source="train", sample="17@0#2", prompt="3+4=", response="7", answer="7", finish_reason="stop")
    numbers = dict(reward=1.0, rewards={"math": 1.0}, advantage=0.5, response_tokens=2, weight_version=3, rollout=1)
    return recorded.Completion(**texts | numbers | changes)


def row(step: int) -> dict[str, object]:
    return {"step": step, "step_kind": "REAL", "phase": "rl", "train/applied": 1.0}


@given(st.integers(0, 20), st.integers(1, 9), st.integers(0, 60))
def test_so_many_are_taken_as_there_are(num_groups, group_size, count):
    """The shares add up to the number that is asked for, or to all; earlier groups give before later ones."""
    shares = share_of_groups(num_groups, group_size, count)
    assert len(shares) == num_groups and all(0 <= share <= group_size for share in shares)
    assert sum(shares) == min(count, num_groups * group_size) and shares == sorted(shares, reverse=True)


def test_two_of_a_group_are_taken_the_best_and_the_worst_unless_there_are_too_few_groups():
    assert share_of_groups(8, 4, 3) == [2, 1, 0, 0, 0, 0, 0, 0] and share_of_groups(2, 8, 6) == [3, 3]
    assert share_of_groups(5, 1, 3) == [1, 1, 1, 0, 0] and best_to_worst([0.0, 1.0, 0.5], 2) == [1, 0]
    assert best_to_worst([0.0, None, 1.0, math.nan], 2) == [2, 3]  # without a reward it is the worst
    assert best_to_worst([0.25, 1.0, 0.5, 0.0, 0.75], 3) == [1, 2, 3] and best_to_worst([1.0, 1.0], 5) == [0, 1]


@given(st.text(max_size=60), st.integers(2, 30))
def test_cut_keeps_both_ends(text, most):
    """A text that fits stays as it is; of a longer one both ends stay, and the number of characters between is said."""
    found = cut(text, most)
    if len(text) <= most:
        assert found == text
        return
    begin, end = most // 2, len(found) - (most - most // 2)
    assert text.startswith(found[:begin]) and text.endswith(found[end:])
    assert found[begin:end] == f" […{len(text) - most} characters…] "


@given(st.text(st.characters(), max_size=50))
def test_visible_text_holds_nothing_that_is_obeyed(text):
    shown = visible(text)
    assert all(c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") for c in shown)
    assert shown.count("\n") == text.count("\n")


def test_plain_text_stays_half_a_surrogate_pair_is_replaced_and_every_line_is_marked():
    assert cut("a\ud800b", 10) == "a\ufffdb" and cut({"x": "\udfff"}, 30).encode("utf-8")
    assert visible("x² + ﬁ\täöü 漢字\u3000🙂\n") == "x² + ﬁ\täöü 漢字\u3000🙂\n" and visible("\x1b[2J") == "\\x1b[2J"
    lines = recorded.as_text(completion(response=HOSTILE, sample="1@0#0", excluded=HOSTILE)).split("\n")
    assert lines[0].startswith("1@0#0: reward 1, advantage 0.5, 2 tokens, stop, excluded: \\x1b[2J")
    assert all(line[10:13] == " | " for line in lines[1:])
    assert not any(unicodedata.category(c) == "Cc" for line in lines for c in line)


def test_a_rollout_becomes_a_record():
    columns = {"answer": 12, "other": "secret"}
    prompt = Prompt(prompt_id="4@1", text="p" * 50, token_ids=(1,), columns=columns, attempt=2)
    sampled = dict(response_ids=(5, 6), logprobs=(0.0, 0.0), text="r\ud800", weight_versions=((9, 1), (8, 1)))
    rollout = Rollout(prompt=prompt, sample_index=3, finish_reason="length", **sampled)
    found = recorded.of_rollout(rollout, source="train", reward=math.nan, rewards={"f": None}, most_chars=10, number=7)
    texts = dict(sample="4@1.2#3", prompt="ppppp […40 characters…] ppppp", response="r\ufffd", answer="12")
    kept = completion(finish_reason="length", reward=None, rewards={"f": None}, weight_version=8, rollout=7, **texts)
    assert found == dataclasses.replace(kept, advantage=None)


def test_completions_survive_the_file(tmp_path):
    given = [
        completion(response=HOSTILE, reward=math.inf, rewards={"a": -math.inf, "b": None}),
        completion(source="eval/test_before", rollout=None, advantage=None, answer=None, reward=None, excluded="x"),
    ]
    with MetricsWriter(tmp_path, MetricsConfig(), 2, True) as writer:
        writer.write(row(4), given)
        writer.write(row(5))
    assert list(read_completions(tmp_path / "completions.jsonl")) == [dataclasses.replace(c, step=4) for c in given]
    text = (tmp_path / "completions.jsonl").read_text(encoding="ascii")
    assert [json.loads(line, parse_constant=pytest.fail)["step"] for line in text.splitlines()] == [4, 4]


def test_a_line_that_is_cut_off_is_left_out_and_another_is_named(tmp_path):
    path = tmp_path / "completions.jsonl"
    with MetricsWriter(tmp_path, MetricsConfig(), 1, True) as writer:
        writer.write(row(1), [completion()])
    whole = path.read_text()
    path.write_text(whole + whole[:40])
    assert len(list(read_completions(path))) == 1
    for bad, said in (
        ("[1]\n", "must be an object"),
        ("{\n", "not valid JSON"),
        ('{"source": "x"}\n', "missing or unknown"),
        (whole.replace('"7"', "7", 1), "response must be a text, and it is 7"),
        (whole.replace("1.0", '"much"', 1), "reward must be a number, and it is 'much'"),
    ):
        path.write_text(whole + bad + whole)
        with pytest.raises(ValueError, match=r"completions\.jsonl:2") as caught:
            list(read_completions(path))
        assert said in str(caught.value)


def test_an_earlier_runs_completions_are_kept_and_a_run_that_resumes_appends(tmp_path):
    for response in ("first", "second"):
        with MetricsWriter(tmp_path, MetricsConfig(), 2, True) as writer:
            writer.write(row(1), [completion(response=response)])
            state = writer.state()
    with MetricsWriter(tmp_path, MetricsConfig(), 2, True, state) as writer:
        writer.write(row(2), [completion(response="third")])
    files = [read_completions(tmp_path / f"completions.jsonl{end}") for end in (".1", "")]
    assert [[(c.step, c.response) for c in file] for file in files] == [[(1, "first")], [(1, "second"), (2, "third")]]


def test_the_log_shows_two_now_and_then_unless_it_is_turned_off(tmp_path, caplog):
    settings = MetricsConfig(print_completions_every_rollouts=3)
    with caplog.at_level(logging.INFO), MetricsWriter(tmp_path, settings, 9, True) as writer:
        for number in range(1, 8):
            writer.write(row(number), [completion(rollout=number, response=f"r{number}-{i}") for i in range(4)])
        writer.write(row(8), [completion(source="eval/x", rollout=None, response="x" * 500 + "\x1b")])
    shown = [record.getMessage() for record in caplog.records]
    sources = [text.removeprefix("completions of ").split(" (")[0] for text in shown]
    assert sources == ["rollout 1", "rollout 4", "rollout 7", "eval/x"]
    assert "r4-1" in shown[1] and "r4-2" not in shown[1]
    assert "[…101 characters…]" in shown[3] and "\x1b" not in shown[3]
    caplog.clear()
    never = MetricsConfig(print_completions_every_rollouts=0)
    with caplog.at_level(logging.INFO), MetricsWriter(tmp_path / "never", never, 1, True) as writer:
        writer.write(row(1), [completion(), completion(source="eval/x", rollout=None)])
    assert caplog.text == "" and len((tmp_path / "never" / "completions.jsonl").read_text().splitlines()) == 2


def byte_level() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXTS[:2], trainers.BpeTrainer(vocab_size=270, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def sentence_piece() -> PreTrainedTokenizerFast:
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"3+4=7naivecf,5tbsdpemojl ", "▁n", "▁+"]
    vocabulary = {name: id for id, name in enumerate(dict.fromkeys(names))}
    merges = [("▁", "n"), ("▁", "+")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
@pytest.mark.parametrize("text", TEXTS)
def test_the_tokens_bytes_are_the_texts(make, text: str) -> None:
    tokenizer = make()
    ids = tokenizer(text)["input_ids"]
    texts = saved.token_texts(tokenizer, ids)
    whole = "".join(texts[id] for id in ids).encode("latin-1").decode("utf-8")
    assert whole == tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def document(*prompts: str) -> dict[str, object]:
    earned = dict(advantage=1 / 3, advantages=(0.0, float("nan")), reward=float("nan"), rewards=(None, 0.5))
    facts = dict(ids=(1, 2), finish_reason="stop", weight_version=3, excluded=None)
    sample = saved.sample_row(sample=0, **earned, **facts)
    groups = [{"prompt": "p", "prompt_id": name, "answer": None, "samples": [sample]} for name in prompts]
    return {"functions": ["f", "g"], "tokens": {"1": "a", "2": "\xff"}, "groups": groups}


def test_a_rollout_is_read_as_it_was_written(tmp_path: pathlib.Path) -> None:
    for number in (1, 2, 11):
        saved.write_rollout(tmp_path, number, 0, document("b"))
    saved.write_rollout(tmp_path, 11, 3, document("a", "c"))
    assert saved.saved_numbers(tmp_path) == [1, 2, 11]
    whole = saved.read_rollout(tmp_path, 11)
    assert [group["prompt_id"] for group in whole["groups"]] == ["a", "b", "c"] and whole["tokens"]["2"] == "\xff"
    (sample,) = whole["groups"][0]["samples"]
    assert (sample["advantage"], sample["advantages"], sample["reward"]) == (0.333333, [0.0, None], None)
    first = saved.read_rollout(tmp_path, 1)["groups"]
    assert [group["prompt_id"] for group in first] == ["b"]  # and none of rollout 11
    saved.forget_after(tmp_path, 2)
    assert saved.saved_numbers(tmp_path) == [1, 2]
    with pytest.raises(FileNotFoundError, match="holds no rollout 11"):
        saved.read_rollout(tmp_path, 11)


def test_a_file_of_another_kind_is_named(tmp_path: pathlib.Path) -> None:
    path = saved.write_rollout(tmp_path, 1, 0, document("a"))
    path.write_bytes(gzip.compress(json.dumps({"rollout": 1}).encode()))
    with pytest.raises(ValueError, match=r"rollout_1\.rank0\.json\.gz has the fields \['rollout'\]"):
        saved.read_rollout(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match="is no gzipped rollout"):
        saved.read_rollout(tmp_path, 1)
