"""Whole rollouts are read back as they were trained; their tokens' bytes in a row are the response's text."""

from __future__ import annotations

import gzip
import json
import pathlib

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megatron_rl.observability.saved_rollouts import (
    forget_after,
    read_rollout,
    sample_row,
    saved_numbers,
    token_texts,
    write_rollout,
)

TEXTS = ["3 + 4 = 7", "naïve café, 5 €", "日本語\n\ttabs  and  spaces", "emoji 🙂🙂 end"]


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
    texts = token_texts(tokenizer, ids)
    whole = "".join(texts[id] for id in ids).encode("latin-1").decode("utf-8")
    assert whole == tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def document(*prompts: str) -> dict[str, object]:
    earned = dict(advantage=1 / 3, advantages=(0.0, float("nan")), reward=float("nan"), rewards=(None, 0.5))
    facts = dict(ids=(1, 2), finish_reason="stop", weight_version=3, excluded=None)
    sample = sample_row(sample=0, **earned, **facts)
    groups = [{"prompt": "p", "prompt_id": name, "answer": None, "samples": [sample]} for name in prompts]
    return {"functions": ["f", "g"], "tokens": {"1": "a", "2": "\xff"}, "groups": groups}


def test_a_rollout_is_read_as_it_was_written(tmp_path: pathlib.Path) -> None:
    for number in (1, 2, 11):
        write_rollout(tmp_path, number, 0, document("b"))
    write_rollout(tmp_path, 11, 3, document("a", "c"))
    assert saved_numbers(tmp_path) == [1, 2, 11]
    whole = read_rollout(tmp_path, 11)
    assert [group["prompt_id"] for group in whole["groups"]] == ["a", "b", "c"] and whole["tokens"]["2"] == "\xff"
    (sample,) = whole["groups"][0]["samples"]
    assert (sample["advantage"], sample["advantages"], sample["reward"]) == (0.333333, [0.0, None], None)
    assert [group["prompt_id"] for group in read_rollout(tmp_path, 1)["groups"]] == ["b"]  # and none of rollout 11
    forget_after(tmp_path, 2)
    assert saved_numbers(tmp_path) == [1, 2]
    with pytest.raises(FileNotFoundError, match="holds no rollout 11"):
        read_rollout(tmp_path, 11)


def test_a_file_of_another_kind_is_named(tmp_path: pathlib.Path) -> None:
    path = write_rollout(tmp_path, 1, 0, document("a"))
    path.write_bytes(gzip.compress(json.dumps({"rollout": 1}).encode()))
    with pytest.raises(ValueError, match=r"rollout_1\.rank0\.json\.gz has the fields \['rollout'\]"):
        read_rollout(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match="is no gzipped rollout"):
        read_rollout(tmp_path, 1)
