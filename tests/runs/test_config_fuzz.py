"""Random configurations end in one sentence or a run; ``python -m tests.runs.test_config_fuzz SEED`` prints a case."""

import operator
import pathlib
import random
import shutil
import sys
import traceback

import pytest

from megatron_rl.config import Config, load_config
from megatron_rl.config.checks import parts_of, range_of
from megatron_rl.config.nearest import all_keys
from megatron_rl.config.typed import hint_at
from megatron_rl.errors import ConfigError
from megatron_rl.validate import validate_config
from tests.pairwise import quick
from tests.patience import patient
from tests.runs.command import ROOT, arguments, command_line
from tools import config_table

CASES, CHUNKS = 2000, 5
TINY = ("metrics.progress=false", "train.num_rollouts=1", "train.prompts_per_rollout=4",
        "train.samples_per_mini_batch=4", "rollout.samples_per_prompt=2", "rollout.max_response_tokens=8",
        "data.max_prompt_tokens=16")
# A larger value than these, of keys that say how much is done, is checked and not run.
LARGEST = {"deadline_s": 10**6, "start_s": 10**6, "request_s": 10**6, "lr": 1e-2, "microbatch_overhead_tokens": 10**9}
# Keys whose values lie outside of the run: files, folders, servers, accounts, other processes.
OUTSIDE = (
    *("run.dir", "run.name", "run.seed", "run.deadline_s", "model.hf_path", "model.tokenizer_path", "critic.hf_path"),
    *("data.", "eval.", "sft.", "reward.functions", "reward.in_process", "reward.deadline_s", "rollout.engine"),
    *("rollout.servers", "environment.", "metrics.wandb", "metrics.mlflow", "metrics.otel", "checkpoint.resume"),
)
WORDS = (
    *("", "x", "nan", "-1", "off", "true", "[]", "{}", "[1, 2]", "{a: 1}", "null", "???", "${run.name}", "${no}"),
    *("1e999", "-0.0", "0.5", "3", "1" + "0" * 18, "9" * 5000, "'", '"', "\t", "*a", "&a", "!!int 3", "a: b", "é"),
    *("\u202e", "../..", "/dev/null", "%s", "None", "[[[]]]", "- 1", "#", "[" * 3000, "${oc.env:NO}", "${", "<<: 1"),
    *("\ud800", "0x10", "1_0"),
    *("${.name}", "${run}", "${oc.select:run.seed}", "${oc.decode:'[1, 2]'}", "${oc.create:{a: 1}}", "${oc.env:NO,3}"),
    *("${oc.dict.keys:optimizer}", "x${run.seed}", r"\${x}", "${oc.coerce:os,1}", "${a:}", "${oc.decode:[}"),
)
YAML_BITS = (*"\t\n :-[]{}&*!|>%@`'\"#?,\0\ud800é0", "<<", "---\n", "...", "!!python/none ", "&a ", "*a ", "${", "1e9")


def drawn_value(draw: random.Random, key: str, named: tuple[str, ...]) -> str:
    """Draw a value as an override writes it: mostly one that the key's type, range or documentation allows."""
    hint = hint_at(Config, key)
    kinds, bounds = {kind for kind, _ in parts_of(hint)}, range_of(hint)
    if draw.random() < 0.25:
        return draw.choice(WORDS)
    if bool in kinds:
        return draw.choice(["true", "false"])
    if bounds is None:
        return draw.choice(named or WORDS)
    ends = [bounds.low - 1, bounds.high * 2, 10**18, "nan", "inf", "-inf", bounds.low, bounds.high]
    inside = [1, 2, 3, 5] if int in kinds else [bounds.low, 1e-3, 0.1, 0.5, 1.0, 2.0]
    value = draw.choice(ends if draw.random() < 0.25 else inside)
    if type(None) in kinds and draw.random() < 0.2:
        value = "null"
    return f"[{value}, {value}]" if "tuple" in str(hint) else str(value)


def drawn_overrides(seed: int) -> list[str]:
    """Return one to four overrides of keys drawn at random."""
    draw, keys = random.Random(seed), sorted(all_keys(Config))
    return [f"{key}={drawn_value(draw, key, NAMED.get(key, ()))}" for key in draw.sample(keys, draw.randint(1, 4))]


def words_of_the_documentation() -> dict[str, tuple[str, ...]]:
    """Return the words that each key's line in docs/configuration.md names: its choices, among them."""
    lines = {f"{key}.{name}": line[0]
             for key, section in config_table.sections()
             for name, line in config_table.field_lines(section).items() if line}
    return {key: tuple(part for part in line.split("`")[1::2] if part.isidentifier()) for key, line in lines.items()}


NAMED = words_of_the_documentation()


def is_run(config: Config, overrides: list[str]) -> bool:
    """Tell whether an accepted case is run: it stays on this machine and takes seconds."""
    keys = [override.partition("=")[0] for override in overrides]
    if any(key.startswith(OUTSIDE) for key in keys):
        return False
    values = [(key.rpartition(".")[2], operator.attrgetter(key)(config)) for key in keys]
    return all(abs(x) <= LARGEST.get(name, 8) for name, x in values if isinstance(x, int | float))


def fault_of(given: list[str], overrides: list[str], run_dir: pathlib.Path) -> str | None:
    """Load, check and run one case; return the fault that it shows, or None."""
    try:
        config = load_config(given[1], [*given[4:], *overrides])
        validate_config(config)
    except ConfigError as error:
        message = str(error)
        return f"a message of {len(message)} characters: {message[:200]}" if len(message) > 1500 else None
    except Exception:  # noqa: BLE001 (the fault that is looked for)
        return traceback.format_exc()
    if not is_run(config, overrides):
        return None
    shutil.rmtree(run_dir, ignore_errors=True)
    try:
        code, said = command_line(0, 1, [*given, *overrides])
    except Exception:  # noqa: BLE001 (the fault that is looked for)
        return traceback.format_exc()
    metrics = run_dir / "metrics.jsonl"
    trained = metrics.exists() and metrics.stat().st_size > 0
    good = code == 0 or (code == 2 and not trained and "Traceback" not in said)
    return None if good else f"exit code {code}: {said[-1500:]}"


def faults_of(rank: int, world: int, folder: str, out: str, seeds: range) -> list[str]:
    """Try the cases of these seeds, one after the other; return the faults, each with its seed and overrides."""
    import torch.distributed as dist

    from megatron_rl.distributed import topology

    run_dir = pathlib.Path(out) / "run"
    given, found = arguments(pathlib.Path(folder), run_dir, *TINY), []
    for seed in seeds:
        overrides = drawn_overrides(seed)
        if fault := fault_of(given, overrides, run_dir):
            found.append(f"seed {seed}: {[text[:80] for text in overrides]}\n{fault}")
        if dist.is_initialized():
            topology.destroy(leave_world=True)
    return found


@pytest.mark.long(seconds=150)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_overrides_are_refused_in_a_sentence_or_train(pool, arithmetic, tmp_path, chunk: int) -> None:
    size = CASES // CHUNKS
    seeds = range(chunk * size, (chunk + 1) * size)
    (found,) = pool.run(1, faults_of, str(arithmetic), str(tmp_path), seeds, timeout_s=patient(900))
    assert not found, "\n\n".join(found)


@pytest.mark.parametrize("seed", quick(range(200), *range(0, 200, 10)))
def test_a_damaged_file_is_refused_in_a_sentence_or_read(tmp_path: pathlib.Path, seed: int) -> None:
    draw = random.Random(seed)
    text = draw.choice(sorted((ROOT / "examples").glob("*/*.yaml"))).read_text(encoding="utf-8")
    for _ in range(draw.randint(1, 6)):
        place = draw.randrange(len(text))
        text = text[:place] + draw.choice(YAML_BITS) + text[place + draw.randint(0, 12) :]
    path = tmp_path / "run.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        load_config(path)
    except ConfigError as error:
        assert len(str(error)) < 1500 and "\n" not in str(error), (seed, str(error))


if __name__ == "__main__":
    print(drawn_overrides(int(sys.argv[1])))
