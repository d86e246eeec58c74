"""The files of whole rollouts for later reading (``metrics.save_rollouts``): one gzipped JSON per rollout and rank.

    {"rollout": 3, "functions": ["score"], "tokens": {"17": "3", ...},
     "groups": [{"prompt": "3+4=", "prompt_id": "17@0", "answer": "7", "samples": [{"sample": 0,
     "ids": [17, 2],
                 "advantage": 0.7, "advantages": null, "reward": 1.0, "rewards": [1.0],
                 "finish_reason": "stop", "weight_version": 2, "excluded": null}, ...]}, ...]}

``tokens`` holds the bytes of every token id that occurs. Each byte is written as the character with
its number (Latin-1), since a token's bytes may be only a part of a character. A number that JSON
cannot hold is null.

``advantages`` has one number per token if the sample's tokens differ, else null. ``advantage`` is the
sample's one advantage, or the mean over its loss tokens. ``excluded`` is the environment's error for
which the sample does not count in its group, or null.
"""

from __future__ import annotations

import gzip
import json
import os
import pathlib
import re
import zlib
from collections.abc import Iterable, Sequence

from megatron_rl.json_text import check, field, parse_json, read_bytes
from megatron_rl.observability.completions import ROLLOUTS_FOLDER, plain

MOST_BYTES = 1 << 28  # the most bytes of a rollout's JSON, over all ranks
_NAME = re.compile(r"rollout_(\d+)\.rank(\d+)\.json\.gz")
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level() -> dict[str, int]:
    """Return {character: byte} of the alphabet in which byte-level BPE writes bytes (GPT-2's table)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


def token_texts(tokenizer: object, ids: Iterable[int]) -> dict[int, str]:
    """Return {token id: its bytes as a Latin-1 text}; joined, the texts of a response's tokens are its bytes.

    tokenizer: a tokenizer of transformers. It may write a byte as a character of byte-level BPE or
        as ``<0x0A>``, and a space before a word as ``▁``; all are turned back into bytes.

    Example: a byte-level tokenizer's ``Ġé`` (a space and é in UTF-8) is ``" \\xc3\\xa9"``.
    """
    unique = sorted(set(ids))
    names = tokenizer.convert_ids_to_tokens(unique)
    decoder = tokenizer.backend_tokenizer.decoder if tokenizer.is_fast else None
    table = _byte_level() if decoder is not None and b'"ByteLevel"' in decoder.__getstate__() else None
    return {id: _text_of(name, table) for id, name in zip(unique, names, strict=True)}


def _text_of(name: str | None, table: dict[str, int] | None) -> str:
    if name is None:
        return "\ufffd".encode().decode("latin-1")
    if table is not None and all(character in table for character in name):
        return bytes(table[character] for character in name).decode("latin-1")
    if byte := _BYTE.fullmatch(name):
        return chr(int(byte[1], 16))
    return name.replace("▁", " ").encode("utf-8", "replace").decode("latin-1")


def write_rollout(run_dir: pathlib.Path, number: int, rank: int, document: dict[str, object]) -> pathlib.Path:
    """Write this rank's samples of a rollout to a file, whole or not at all; return the file's path.

    number: the number of the rollout, from 1.
    document: the fields of the file, without ``rollout``.
    """
    folder = run_dir / ROLLOUTS_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rollout_{number}.rank{rank}.json.gz"
    text = json.dumps({"rollout": number, **document}, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    partial = path.with_name(f".{path.name}.part")
    partial.write_bytes(gzip.compress(text.encode("ascii"), mtime=0))
    os.replace(partial, path)
    return path


def saved_numbers(run_dir: pathlib.Path) -> list[int]:
    """Return the numbers of the rollouts saved in a run's folder, in order."""
    found = (_NAME.fullmatch(path.name) for path in (run_dir / ROLLOUTS_FOLDER).glob("rollout_*.json.gz"))
    return sorted({int(match[1]) for match in found if match})


def read_rollout(run_dir: pathlib.Path, number: int) -> dict[str, object]:
    """Return one saved rollout with the groups of all ranks, sorted by ``prompt_id``.

    Raises ValueError for a file that ``write_rollout`` did not write, FileNotFoundError for a
    rollout that is not saved.
    """
    paths = [
        path
        for path in (run_dir / ROLLOUTS_FOLDER).glob(f"rollout_{number}.rank*.json.gz")
        if _NAME.fullmatch(path.name)
    ]
    if not paths:
        raise FileNotFoundError(f"{run_dir / ROLLOUTS_FOLDER} holds no rollout {number}")
    whole: dict[str, object] = {"rollout": number, "functions": [], "tokens": {}, "groups": []}
    left = MOST_BYTES
    for path in sorted(paths):
        text = _unpacked(path, left)
        left -= len(text)
        row = check(parse_json(text, str(path), error=ValueError), str(path), dict, error=ValueError)
        if row.keys() != whole.keys():
            raise ValueError(f"{path} has the fields {sorted(row)}; a saved rollout's are {sorted(whole)}")
        field(row, "functions", list, str(path), error=ValueError)
        field(row, "tokens", dict, str(path), error=ValueError)
        for number, group in enumerate(field(row, "groups", list, str(path), error=ValueError)):
            where = f"{path}: groups[{number}]"
            field(check(group, where, dict, error=ValueError), "prompt_id", str, where, error=ValueError)
        whole["functions"] = row["functions"]
        whole["tokens"] |= row["tokens"]
        whole["groups"] += row["groups"]
    whole["groups"].sort(key=lambda group: group["prompt_id"])
    return whole


def _unpacked(path: pathlib.Path, most_bytes: int) -> bytes:
    """Return the unpacked bytes of a gzipped file; raise ValueError if they are more than ``most_bytes``."""
    content = read_bytes(path, "a gzipped rollout", most_bytes=MOST_BYTES, error=ValueError)
    stream = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        text = stream.decompress(content, most_bytes + 1)
    except zlib.error as error:
        raise ValueError(f"{path} is no gzipped rollout: {error}; delete it") from error
    if len(text) > most_bytes:
        raise ValueError(f"{path} unpacks to more than a rollout's {MOST_BYTES} bytes over all ranks; delete it")
    if not stream.eof or stream.unused_data:
        raise ValueError(f"{path} is no gzipped rollout: it was cut short or has a tail; delete it")
    return text


def forget_after(run_dir: pathlib.Path, number: int) -> None:
    """Delete the saved rollouts after ``number``, which a run that resumes from a checkpoint generates again."""
    for path in (run_dir / ROLLOUTS_FOLDER).glob("rollout_*.json.gz"):
        match = _NAME.fullmatch(path.name)
        if match and int(match[1]) > number:
            path.unlink(missing_ok=True)


def sample_row(
    *,
    sample: int,
    ids: Sequence[int],
    advantage: float,
    advantages: Sequence[float] | None,
    reward: float | None,
    rewards: Sequence[float | None],
    finish_reason: str,
    weight_version: int,
    excluded: str | None,
) -> dict[str, object]:
    """Return one sample as the dict that a rollout's file holds (see the module), with rounded numbers.

    advantages: the advantage of each token of ``ids`` if they differ, else None.
    """
    return {
        "sample": sample,
        "ids": list(map(int, ids)),
        "advantage": plain(advantage),
        "advantages": None if advantages is None else list(map(plain, advantages)),
        "reward": plain(reward),
        "rewards": list(map(plain, rewards)),
        "finish_reason": finish_reason,
        "weight_version": weight_version,
        "excluded": excluded,
    }
