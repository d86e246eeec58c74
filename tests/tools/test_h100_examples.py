"""The launch lines of examples/h100, through sbatch templates without SLURM, start jobs that the page forecasts.

Sizes are the models' published ones. No GPU is at hand: that the runs work there is not shown.
"""

import argparse
import json
import pathlib
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import pytest
import yaml

from megatron_rl import train
from megatron_rl.config import Config, load_config
from megatron_rl.simulator.arguments import add_arguments
from megatron_rl.simulator.command import simulate_job
from megatron_rl.simulator.engine_memory import GIB
from megatron_rl.trainer.dry_run import check_engine
from megatron_rl.validate import validate_config
from tests.pairwise import quick
from tests.tools import ROOT
from tests.tools.slurm_stand_ins import submit

FOLDER = ROOT / "examples" / "h100"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
QWEN = dict(rms_norm_eps=1e-6, rope_theta=1e6, hidden_act="silu", tie_word_embeddings=False, num_key_value_heads=4)
DENSE = dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_size=3584, intermediate_size=18944)
DENSE |= dict(num_hidden_layers=28, num_attention_heads=28, vocab_size=152064, max_position_embeddings=32768)
MIXTURE = dict(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", hidden_size=2048, intermediate_size=6144)
MIXTURE |= dict(num_hidden_layers=48, num_attention_heads=32, vocab_size=151936, max_position_embeddings=40960)
MIXTURE |= dict(moe_intermediate_size=768, head_dim=128, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True)
MODELS = {"Qwen2.5-7B-Instruct": QWEN | DENSE, "Qwen3-30B-A3B": QWEN | MIXTURE}
GSM8K = re.search(r"^For GSM8K:.* and `(.*)` at the end", PAGE, re.M)[1].split()
MOST_GIB = 72.0  # of 80: a tenth is for what the forecast does not count


class Launch(NamedTuple):
    """A launch line of the page: its model's folder, variables, number of nodes, template and arguments."""

    model: str
    variables: Mapping[str, str]
    num_nodes: int
    template: str
    arguments: list[str]


def launches() -> Iterator[tuple[str, Launch]]:
    """Yield the page's launch lines by their labels, the comment above each."""
    label = model = ""
    for line in PAGE.replace("\\\n", " ").splitlines():
        if found := re.match(r"    export MODEL=/models/(\S+)", line):
            model = found[1]
        if line.startswith("    # "):
            label = line.removeprefix("    # ")
        if found := re.match(r"    ((?:[A-Z_]+=\S+ )*)sbatch (.*)", line):
            words = shlex.split(found[2])
            template = next(i for i, word in enumerate(words) if word.endswith(".sbatch"))
            given = dict(word.partition("=")[::2] for word in words[:template])
            variables = dict(word.split("=") for word in found[1].split())
            path = pathlib.Path(words[template]).name
            yield label, Launch(model, variables, int(given.get("--nodes", 1)), path, words[template + 1 :])


LAUNCHES = dict(launches())


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("models")
    for name, sizes in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(sizes))
    return folder


def started(tmp_path: pathlib.Path, models: pathlib.Path, launch: Launch) -> tuple[int, int, list[str]]:
    """Submit a launch line; return the trainer's nodes, the GPUs that serve, and the trainer's words."""
    names = " ".join(f"n{i}" for i in range(launch.num_nodes))
    variables = {"MODEL": str(models / launch.model), **launch.variables}
    code, calls, said = submit(tmp_path, launch.template, *launch.arguments, nodes=names, **variables)
    assert code == 0, said
    trainer = next(call for call in calls if "-m megatron_rl.train" in call)
    server = next((call for call in calls if "serve_vllm" in call), "")
    serving = [int(x) for x in re.findall(r"--(?:nodes|tensor-parallel-size|replicas)[= ](\d+)", server)]
    gpus = serving[0] * serving[1] * serving[2] if serving else 0
    return int(re.search(r"--nodes=(\d+)", trainer)[1]), gpus, trainer.partition("-m megatron_rl.train ")[2].split()


def config_of(words: list[str], *further: str) -> Config:
    path = words[words.index("--config") + 1]
    config = load_config(ROOT / path, [*[word for word in words if re.match(r"[a-z_]+\.[a-z_.]+=", word)], *further])
    validate_config(config)
    return config


def figures_of(config: Config, num_nodes: int, file: pathlib.Path) -> dict:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert simulate_job(config, parser.parse_args(["--nodes", str(num_nodes), "--json", str(file)])) is None
    return json.loads(file.read_text())


def test_both_models_are_launched_in_four_ways() -> None:
    assert [launch.model for launch in LAUNCHES.values()] == [name for name in MODELS for _ in range(4)]
    assert [launch.num_nodes for launch in LAUNCHES.values()] == [1, 4, 2, 4] * 2


@pytest.mark.parametrize("label", quick(LAUNCHES, *[list(LAUNCHES)[i] for i in (1, 6)]))  # without and with engines
def test_a_launch_line_starts_what_the_page_forecasts(label, models, tmp_path, monkeypatch) -> None:
    """The line's trainer fits with a margin of 10 %, its time and memory are the page's, and no GPU is left idle."""
    launch = LAUNCHES[label]
    monkeypatch.setenv("MODEL", str(models / launch.model))
    num_nodes, serving, words = started(tmp_path, models, launch)
    config = config_of(words)
    assert 8 * num_nodes + serving == 8 * launch.num_nodes
    assert len(config.rollout.servers) * int(launch.variables.get("VLLM_TP", 1)) == serving
    sections = config.rollout, config.weight_sync, config.lora
    check_engine(*sections, config.model.dtype, 8 * num_nodes, 8, elsewhere=True)
    math = figures_of(config, num_nodes, tmp_path / "math.json")
    gsm8k = figures_of(config_of(words, *GSM8K), num_nodes, tmp_path / "gsm8k.json")
    needs = [math["needs"][time][0] / GIB for time in ("training", "generating")]
    assert max(needs) <= MOST_GIB
    seconds = [f"{found[run]['update_s']:.1f} s" for found in (math, gsm8k) for run in ("dense", "skip")]
    row = [label, *seconds[:2], *(f"{size:.1f}" for size in needs), *seconds[2:]]
    assert f"| {' | '.join(row)} |" in PAGE.splitlines()


@pytest.mark.parametrize("name", ["qwen2.5-7b.yaml", "qwen3-30b-a3b.yaml"])
def test_every_setting_has_its_reason(name: str) -> None:
    """A comment stands on a setting's line or above it; in the mixture's file, for what differs from the other file."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert "Not yet run" in text.split("\nrun:")[0]
    dense = yaml.safe_load((FOLDER / "qwen2.5-7b.yaml").read_text(encoding="utf-8"))
    own = yaml.safe_load(text)
    section, above, without = "", "", []
    for line in text.splitlines():
        if found := re.match(r"( *)(\w+):(.*)", line):
            section, key = (section, found[2]) if found[1] else (found[2], "")
            value, other = own[section], dense.get(section, {})
            value, other = (value[key], other.get(key)) if key else (value, other)
            same = name != "qwen2.5-7b.yaml" and value == other
            if found[3].strip() and not same and "#" not in line and not above.strip().startswith("#"):
                without.append(line)
        above = line
    assert not without


@pytest.mark.parametrize("label", quick(["7B, one node", "30B-A3B, one node"], "30B-A3B, one node"))
def test_dry_run_accepts_each_file_with_a_tokenizer_and_data(label, models, arithmetic, tmp_path, monkeypatch) -> None:
    """A dry run checks all but the weights: the data's columns, the chat template, the rewards, the engine's rules."""
    launch, model, data = LAUNCHES[label], tmp_path / "model", tmp_path / "data"
    for folder in (model, data):
        folder.mkdir()
    for path in (arithmetic / "model").glob("*token*"):
        (model / path.name).write_bytes(path.read_bytes())
    (model / "config.json").write_bytes((models / launch.model / "config.json").read_bytes())
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    for split in ("train", "test"):
        row = {"prompt": "1+1=", "solution": "\\boxed{2}", "answer": "\\boxed{2}"}
        (data / f"{split}.jsonl").write_text((json.dumps(row) + "\n") * 4)
    for name, value in (("MODEL", model), ("DATA", data)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(tmp_path)
    tokenizer = "data.system_prompt=0"  # the arithmetic tokenizer knows digits and signs alone
    given = ["--config", str(ROOT / launch.arguments[1]), "model.init=random", tokenizer, "--dry-run", "--nodes", "1"]
    assert train.main(given) == 0
    assert train.main([*given, "rollout.servers=[http://node-b:8001]", "rollout.producer.mode=prefetch"]) == 0
