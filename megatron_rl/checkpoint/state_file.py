"""The reader of a checkpoint's state.json: it checks every field that a run resumes with before any field is used.

A field that is missing, of another type or out of range counts as damage, even if the file's digest
matches the manifest. The DamagedCheckpoint error names the file and the field. The run may then
resume from the checkpoint before.
"""

from __future__ import annotations

import base64
import binascii
import functools
import math
import pathlib
from collections.abc import Mapping

import torch

from megatron_rl import json_text
from megatron_rl.checkpoint.folder import STATE, DamagedCheckpoint

MOST_BYTES = 2**31  # a rank's random states take about 20 kB
MOST_COUNT = 2**53  # steps, rollouts, tokens or bytes
PYTHON_WORDS, NUMPY_WORDS = 625, 624  # words in the state of a Mersenne Twister; Python's has its position too

field = functools.partial(json_text.field, error=DamagedCheckpoint)
check = functools.partial(json_text.check, error=DamagedCheckpoint)


def read_state(folder: pathlib.Path) -> dict:
    """Return the content of a run's state.json. Raises DamagedCheckpoint, naming file and field, if it is not valid."""
    where = str(folder / STATE)
    state = read_model_state(folder)
    for name in ("rollouts", "trace_rollouts"):
        _count(state, name, where)
    if state.get("supervised_steps") is not None:
        _count(state, "supervised_steps", where)
    world_size = field(state, "world_size", int, where, least=1, most=2**20)
    _check_queue(field(state, "feed", dict, where), f"{where}: feed")
    _check_prompts(field(state, "prompts", dict, where), f"{where}: prompts")
    _check_metrics(field(state, "metrics", dict, where), f"{where}: metrics")
    if "reference" in state:  # older checkpoints lack it
        reference = field(state, "reference", dict, where)
        if "coefficient" not in reference or reference["coefficient"] is not None:
            field(reference, "coefficient", float, f"{where}: reference", least=0)
    sizes = field(state, "bytes", dict, where)
    for name in sizes:
        _count(sizes, name, f"{where}: bytes")
    field(state, "config", dict, where)
    states = field(state, "random", list, where)
    if len(states) != world_size:
        raise DamagedCheckpoint(f"{where}: random holds the states of {len(states)} ranks, and world_size={world_size}")
    for rank, value in enumerate(states):
        _check_random(check(value, f"{where}: random[{rank}]", dict), f"{where}: random[{rank}]")
    return state


def read_model_state(folder: pathlib.Path) -> dict:
    """Return the content of a state.json, of which only the fields ``model`` and ``backend`` are checked.

    A critic's state.json has no other fields. Raises DamagedCheckpoint, naming file and field.
    """
    where = str(folder / STATE)
    state = json_text.read_object(folder / STATE, most_bytes=MOST_BYTES, error=DamagedCheckpoint)
    field(state, "model", dict, where)
    numbers, where = field(state, "backend", dict, where), f"{where}: backend"
    for name in ("step_index", "weight_version", "optimizer_steps"):
        _count(numbers, name, where)
    for name in ("has_reference", "distributed_optimizer"):
        field(numbers, name, bool, where)
    if "has_masters" in numbers:  # older checkpoints lack it
        field(numbers, "has_masters", bool, where)
    for number, count in enumerate(field(numbers, "stage_layers", list, where) if "stage_layers" in numbers else ()):
        check(count, f"{where}: stage_layers[{number}]", int, least=0, most=MOST_COUNT)
    rows = field(numbers, "cost_sums", list, where)
    for number, row in enumerate(rows):
        for place, value in enumerate(check(row, f"{where}: cost_sums[{number}]", list)):
            check(value, f"{where}: cost_sums[{number}][{place}]", float)
        if len(row) != len(rows[0]):
            raise DamagedCheckpoint(f"{where}: cost_sums[{number}] has {len(row)} columns, and row 0 {len(rows[0])}")
    return state


def _count(values: Mapping, name: str, where: str) -> int:
    return field(values, name, int, where, least=0, most=MOST_COUNT)


def _check_key(value: object, where: str) -> None:
    """Raise DamagedCheckpoint unless ``value`` is a list [prompt id, attempt].

    attempt is the number of earlier times that the prompt was answered.

    where: the value's place in state.json, for messages.
    """
    if len(check(value, where, list)) != 2:
        raise DamagedCheckpoint(f"{where} must be a prompt's id and attempt, and it has {len(value)} parts")
    check(value[0], f"{where}[0]", str)
    check(value[1], f"{where}[1]", int, least=0, most=MOST_COUNT)


def _check_places(asked: object, where: str) -> None:
    """Raise DamagedCheckpoint unless ``asked`` is a list of [place, prompt id, attempt, samples].

    A place is the group's index in its rollout. Older releases write no number of samples.

    where: the list's place in state.json, for messages.
    """
    for i, entry in enumerate(check(asked, where, list)):
        if len(check(entry, f"{where}[{i}]", list)) not in (3, 4):
            raise DamagedCheckpoint(f"{where}[{i}] must be a place, a prompt's id, its attempt and its samples")
        check(entry[0], f"{where}[{i}][0]", int, least=0, most=MOST_COUNT)
        _check_key(entry[1:3], f"{where}[{i}]")
        for samples in entry[3:]:
            check(samples, f"{where}[{i}][3]", int, least=1, most=MOST_COUNT)


def _check_sizes(sizes: Mapping, where: str) -> None:
    """Raise DamagedCheckpoint unless ``sizes`` is {} or a state of ``AdaptiveSizes`` (groups/adaptive_sizes.py)."""
    for name in sizes:
        if name not in ("rows", "variances"):
            raise DamagedCheckpoint(f"{where} has a field {json_text.quoted(name)} that no release writes")
    pairs = {f"rows.{row}": pair for row, pair in (field(sizes, "rows", dict, where) if sizes else {}).items()}
    if sizes:
        pairs["variances"] = field(sizes, "variances", list, where)
    for name, pair in pairs.items():
        if len(check(pair, f"{where}.{name}", list)) != 2:
            raise DamagedCheckpoint(f"{where}.{name} must be two numbers")
        for place, value in enumerate(pair):
            if not 0 <= check(value, f"{where}.{name}[{place}]", float) < math.inf:
                raise DamagedCheckpoint(f"{where}.{name}[{place}]={value} must be a finite number, at least 0")


def _check_queue(queue: Mapping, where: str) -> None:
    _count(queue, "next_rollout", where)
    for number, places in field(queue, "jobs", dict, where).items():
        job = f"{where}.jobs.{json_text.quoted(number)[1:-1]}"
        if not (number.isascii() and number.isdigit() and len(number) < 16):
            raise DamagedCheckpoint(f"{job}: the name of a rollout must be its number")
        _check_places(places, job)
    if "left" in queue:  # older releases write neither stragglers nor lengths
        _check_places(queue["left"], f"{where}.left")
    lengths = field(queue, "lengths", dict, where) if "lengths" in queue else {}
    for row in lengths:
        _count(lengths, row, f"{where}.lengths")
    if "sizes" in queue:
        _check_sizes(field(queue, "sizes", dict, where), f"{where}.sizes")
    keys = set()
    entries = field(field(queue, "replay", dict, where), "entries", list, f"{where}.replay")
    for i, entry in enumerate(entries):
        at_entry = f"{where}.replay.entries[{i}]"
        keys.add(field(check(entry, at_entry, dict), "key", str, at_entry))
        field(entry, "score", float, at_entry)
        _count(entry, "version", at_entry)
        _count(entry, "uses", at_entry)
        if extra := sorted(entry.keys() - {"key", "score", "version", "uses"}):
            raise DamagedCheckpoint(f"{at_entry} has a field {json_text.quoted(extra[0])} that no release writes")
    if len(keys) != len(entries):
        raise DamagedCheckpoint(f"{where}.replay.entries holds a key twice")
    reroll = field(queue, "reroll", dict, where)
    for i, entry in enumerate(field(reroll, "waiting", list, f"{where}.reroll")):
        _check_key(entry, f"{where}.reroll.waiting[{i}]")
    for name in ("num_buffered", "num_issued"):
        _count(reroll, name, f"{where}.reroll")


def _check_prompts(prompts: Mapping, where: str) -> None:
    for name in ("prompts", "solutions"):
        _count(prompts, name, where)
    for i, entry in enumerate(field(prompts, "returned", list, where)):
        _check_key(entry, f"{where}.returned[{i}]")


def _check_metrics(metrics: Mapping, where: str) -> None:
    _count(metrics, "ghost_steps", where)
    if "last_step" not in metrics or metrics["last_step"] is not None:
        _count(metrics, "last_step", where)


def _check_random(state: Mapping, where: str) -> None:
    """Raise DamagedCheckpoint unless ``state`` is a valid result of ``random_state.random_state`` of one rank."""
    for name in ("torch", *(["cuda"] if "cuda" in state else [])):
        try:
            content = base64.b64decode(field(state, name, str, where), validate=True)
            if name == "torch":
                torch.Generator().set_state(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        except (binascii.Error, ValueError, RuntimeError, TypeError) as error:
            raise DamagedCheckpoint(f"{where}.{name} is not a generator's state: {error}") from None
    python = field(state, "python", list, where)
    numpy = field(state, "numpy", list, where)
    if len(python) != 3 or python[0] != 3 or len(check(python[1], f"{where}.python[1]", list)) != PYTHON_WORDS:
        raise DamagedCheckpoint(f"{where}.python is not the state of a Mersenne Twister of version 3")
    if len(numpy) != 5 or numpy[0] != "MT19937" or len(check(numpy[1], f"{where}.numpy[1]", list)) != NUMPY_WORDS:
        raise DamagedCheckpoint(f"{where}.numpy is not the state of an MT19937")
    for name, words in (("python", python[1]), ("numpy", numpy[1])):
        for i, word in enumerate(words):
            check(word, f"{where}.{name}[1][{i}]", int, least=0, most=2**32 - 1)
    check(python[1][-1], f"{where}.python[1][{PYTHON_WORDS - 1}]", int, least=0, most=NUMPY_WORDS)
    check(numpy[2], f"{where}.numpy[2]", int, least=0, most=NUMPY_WORDS)
    check(numpy[3], f"{where}.numpy[3]", int, least=0, most=1)
    for name, gauss in (
        (f"{where}.python[2]", 0.0 if python[2] is None else python[2]),
        (f"{where}.numpy[4]", numpy[4]),
    ):
        if not math.isfinite(check(gauss, name, float)):
            raise DamagedCheckpoint(f"{name} is not finite")
