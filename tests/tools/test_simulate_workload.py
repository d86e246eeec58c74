"""Checks workloads, coefficients and command lines of the simulator."""

import dataclasses
import json
import os
import pathlib
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from megatron_rl.config import load_config
from megatron_rl.errors import ConfigError
from megatron_rl.observability.trace import append_trace
from megatron_rl.simulator import __main__ as simulate_cluster
from megatron_rl.simulator.degrees import degrees_of
from megatron_rl.simulator.forecast import forecast
from megatron_rl.simulator.job_size import JobSize, job_size
from megatron_rl.simulator.machine import Machine, assumed_flops, load_coefficients, machine_costs
from megatron_rl.simulator.memory import stage_parameters
from megatron_rl.simulator.picture import picture
from megatron_rl.simulator.workload import Workload, draw, read_trace
from megatron_rl.validate.critic import policy_ranks
from tests.reference import tiny_config
from tests.tools import words
from tests.tools.simulated_job import equal_samples, per_token, tiny_job


def test_a_trace_comes_back_as_written(tmp_path: pathlib.Path) -> None:
    config = load_config(None, ["train.prompts_per_rollout=8", "rollout.samples_per_prompt=4"])
    workloads = [draw(config, lengths=None, pass_rate=None, prompt_tokens=9, seed=seed)[0] for seed in (0, 1)]
    workloads[0].rewards[3] = np.nan
    for rollout, workload in enumerate(workloads):
        append_trace(tmp_path / "trace.jsonl", rollout, workload)
    for found, wanted in zip(read_trace(tmp_path), workloads, strict=True):
        for field in dataclasses.fields(Workload):
            np.testing.assert_array_equal(getattr(found, field.name), getattr(wanted, field.name))


def test_a_trace_by_samples_equals_one_by_rollouts(tmp_path: pathlib.Path, caplog) -> None:
    """Tokens with loss default to the response's, those that are read to all but its last; a cut line is left out."""
    whole = equal_samples(4, 20)
    wanted = dataclasses.replace(whole, response_inputs=whole.response_tokens - 1)
    names = ("prompt_tokens", "response_tokens", "reward", "group")
    columns = (wanted.prompt_tokens, wanted.response_tokens, wanted.rewards, wanted.groups)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    lines = [json.dumps(dict(zip(names, row, strict=True))) for row in rows]
    (tmp_path / "by_sample.jsonl").write_text("\n".join([*lines, lines[0][:20]]))
    append_trace(tmp_path / "trace.jsonl", 7, wanted)
    assert len((tmp_path / "trace.jsonl").read_text().splitlines()) == 1
    for name in ("by_sample.jsonl", "trace.jsonl"):
        (found,) = read_trace(tmp_path / name)
        for field in dataclasses.fields(Workload):
            np.testing.assert_array_equal(getattr(found, field.name), getattr(wanted, field.name))
    assert "by_sample.jsonl:5 is cut off and was left out" in caplog.text


@pytest.mark.parametrize(("again", "message"), [
    ({}, "trace.jsonl:2: rollout 1 came before"),
    ({"rollout": 2, "reward": [1.0]}, "lists of different lengths: .*'reward': 1"),
    ({"rollout": 2, "group": ["x"] * 4}, "ValueError"),
    ({"rollout": 2, "prompt_tokens": [None] * 4}, "cannot convert float NaN to integer"),
])
def test_a_line_that_is_no_rollout_is_named(tmp_path: pathlib.Path, again: dict, message: str) -> None:
    file = tmp_path / "trace.jsonl"
    append_trace(file, 1, equal_samples(4, 20))
    file.write_text(file.read_text() + json.dumps(json.loads(file.read_text()) | again) + "\n")
    with pytest.raises(ConfigError, match=message):
        read_trace(file)


def test_gdpo_reads_each_functions_rewards(tmp_path: pathlib.Path) -> None:
    """Two functions that disagree and whose weighted sum is the same give signal under gdpo alone."""
    by_function = {"a:f": np.array([1.0, 0.0]), "b:g": np.array([0.0, 2.0])}
    workload = dataclasses.replace(equal_samples(2, 20), rewards=np.ones(2), by_function=by_function)
    append_trace(tmp_path / "trace.jsonl", 1, workload)
    (found,) = read_trace(tmp_path)
    assert tiny_job(equal_samples(8, 20, dead=2), 1).signal().tolist() == [False] * 4 + [True] * 4
    given = ["reward.functions=[a:f,b:g]", "reward.weights=[1.0,0.5]"]
    assert tiny_job(found, 1, *given, "advantage.estimator=gdpo").signal().all()
    assert not tiny_job(found, 1, *given).signal().any()
    with pytest.raises(ConfigError, match=r"reward.functions=\['a:h'\] and the trace has those of \['a:f', 'b:g'\]"):
        tiny_job(found, 1, "reward.functions=[a:h]", "advantage.estimator=gdpo").signal()


def test_draws_have_the_stated_means() -> None:
    """The means of 40,000 lengths and 10,000 prompts are within 2 % of those stated: four standard errors."""
    given = "train.prompts_per_rollout=10000 rollout.samples_per_prompt=4 rollout.max_response_tokens=100000"
    config = load_config(None, words(given))
    workload, said = draw(config, lengths="lognormal:800,0.6", pass_rate="beta:2,3", prompt_tokens=50, seed=0)
    assert workload.response_tokens.mean() == pytest.approx(800, rel=0.02)
    assert workload.rewards.mean() == pytest.approx(0.4, rel=0.02)
    assert "lognormal:800,0.6" in said and "beta:2,3" in said


def test_coefficients_of_a_run_and_of_a_machine(tmp_path: pathlib.Path) -> None:
    job = tiny_job(equal_samples(8, 20), 2, "parallel.pipeline=2")
    overheads = dict(layer_overhead_s=1e-3, adam_s=1e-9, reduce_s=2e-9, update_overhead_s=0.1)
    machine = Machine(flops_per_s=1e9, attention_flops_per_s=5e8, **overheads)
    file = tmp_path / "coefficients.json"
    file.write_text(json.dumps({"machine": dataclasses.asdict(machine), "measured_on": "a laptop"}))
    read = load_coefficients(file, job.placed, loss_share=0.8)
    assert read.model == machine_costs(machine, job.placed, loss_share=0.8, source="").model
    assert read.source == "coefficients of coefficients.json: a laptop"
    dense = stage_parameters(job.shape, job.degrees, 1)[0]
    assert read.optimizer_s == pytest.approx(0.1 + 1e-9 * dense)  # one replica: nothing is reduced
    stage = {"overhead": 0.1, "token": 1e-3, "square": 0.0}
    file.write_text(json.dumps({"stages": [stage, stage], "virtual": 1, "optimizer_s": 0.5}))
    assert load_coefficients(file, job.placed, loss_share=0.8).from_run
    file.write_text(json.dumps({"stages": [stage], "virtual": 1, "optimizer_s": 0.5}))
    with pytest.raises(ConfigError, match="1 pipeline stages of 1 chunks and this configuration has 2 of 1"):
        load_coefficients(file, job.placed, loss_share=0.8)


def test_the_rate_that_is_assumed_of_a_mixture_is_its_own() -> None:
    jobs = [tiny_job(equal_samples(8, 20), 2, family=family) for family in ("qwen3", "mixtral")]
    rates = [assumed_flops(job.shape)[0] for job in jobs]
    assert rates == [4e14, 2.7e14] and [round(rate / 989e12, 2) for rate in rates] == [0.40, 0.27]


def test_the_number_of_gpus_is_stated_or_assumed_aloud() -> None:
    """What is assumed is the job that its own flags state, and one that the degrees divide."""
    one_node = load_config(None, [])
    for environment, gpus in (({"WORLD_SIZE": "6"}, 6), ({"SLURM_NNODES": "3", "SLURM_GPUS_ON_NODE": "4"}, 12)):
        assert job_size(one_node, None, None, environment).gpus == gpus
    assert job_size(one_node, 4, None, {"WORLD_SIZE": "6"}) == JobSize(gpus=32, on_node=8)
    with pytest.raises(ConfigError, match="--nodes=0 must be at least 1"):
        job_size(one_node, 0, None, {})
    critic, vllm = "advantage.estimator=gae critic.placement=separate critic.ranks=", "rollout.engine=vllm rollout."
    for settings, host_gpus, gpus in (
        ("", 0, 8), ("", 2, 2), ("parallel.pipeline=3", 0, 6), ("parallel.pipeline=3 parallel.tensor=4", 0, 24),
        ("parallel.expert=16", 0, 16), (f"{critic}2", 0, 8), (f"{critic}4 parallel.tensor=8", 0, 12),
        (f"{vllm}tensor_parallel=4 rollout.num_engines=4", 0, 16), ("parallel.tensor=8", 2, 8),
    ):
        config = load_config(None, words(settings))
        size = job_size(config, None, None, {}, host_gpus=host_gpus)
        assert size.gpus == gpus, settings
        nodes, on_node = re.search(r"--nodes (\d+) --gpus-per-node (\d+)", size.assumed).groups()
        assert job_size(config, int(nodes), int(on_node), {}) == dataclasses.replace(size, assumed=None)
        degrees_of(config.parallel, policy_ranks(config.separate_critic_ranks, gpus))
    with pytest.raises(ConfigError, match="world size 6 is no multiple of"):
        degrees_of(load_config(None, ["parallel.pipeline=4"]).parallel, 6)


@pytest.fixture
def arguments(tmp_path: pathlib.Path) -> list[str]:
    tiny_config("qwen3", layers=8).save_pretrained(tmp_path / "model")
    sizes = "plan.max_tokens_per_microbatch=256 data.max_prompt_tokens=64 rollout.max_response_tokens=128"
    return words(f"model.hf_path={tmp_path}/model parallel.pipeline=4 reward.functions=[arithmetic] {sizes}")


def test_the_tool_prints_and_writes(arguments, tmp_path: pathlib.Path, capsys) -> None:
    svg, written = tmp_path / "pipeline.svg", tmp_path / "figures.json"
    assert simulate_cluster.main(["--nodes", "2", "--svg", str(svg), *arguments, "--json", str(written)]) == 0
    printed, content = capsys.readouterr().out, json.loads(written.read_text())
    assert "TP 1, PP 4, DP 4" in printed and "not measured" in printed and "binds: " in printed
    assert content["costs"].startswith("assumed: 4e+14 FLOP/s per GPU (40 %")
    assert content["world_size"] == 16 and len(content["memory"]) == 4 and content["gain_predicted"] > 1
    dense = content["dense"]
    assert dense["update_s"] == pytest.approx(dense["pipeline_s"] + dense["optimizer_s"])
    assert ElementTree.fromstring(svg.read_text()).tag.endswith("svg")


def test_the_picture_has_a_box_for_every_operation() -> None:
    found = forecast(tiny_job(equal_samples(16, 40, dead=4), 8, "parallel.pipeline=4", costs=per_token(4)))
    shapes = ElementTree.fromstring(picture(found, "a <title>")).iter()
    boxes = [x.get("class") for x in shapes if x.tag.endswith("rect")]
    assert boxes.count("forward") - 1 == boxes.count("backward") - 1 == 4 * (8 + 4)  # one each is the legend's
    # half of the dense run's, and what the skip saves
    assert boxes.count("dead") - 1 == 2 * 4 * 4 and boxes.count("saved") == 1


def test_a_trace_forecasts_as_its_samples_do(arguments, tmp_path: pathlib.Path, capsys) -> None:
    """A trace forecasts its rollout of median update time; two sources at once are an error."""
    config = load_config(None, ["model.dtype=float32", *arguments])
    trace, written = tmp_path / "trace.jsonl", tmp_path / "figures.json"
    for rollout, mean in enumerate((40, 80, 60)):
        drawn, _ = draw(config, lengths=f"lognormal:{mean},0.3", pass_rate=None, prompt_tokens=9, seed=0)
        append_trace(trace, rollout, drawn)
    command = [*arguments, "--nodes", "1", "--trace", str(trace), "--json", str(written)]
    assert simulate_cluster.main([*command, "plan.share_prompts=false"]) == 0
    lengths = read_trace(trace)[2].lengths
    assert json.loads(written.read_text())["dense"]["tokens"] == lengths.sum()
    assert "recorded: 3 rollout(s)" in capsys.readouterr().out
    assert simulate_cluster.main([*command, "--pass-rate", "beta:1,1"]) == simulate_cluster.EXIT_CONFIG
    trace.write_text('{"prompt_tokens": 3}\n')
    assert simulate_cluster.main(command) == simulate_cluster.EXIT_CONFIG
    assert "trace.jsonl:1: " in capsys.readouterr().err
    os.truncate(trace, 1 << 36)  # a hole, which was read whole
    assert simulate_cluster.main(command) == simulate_cluster.EXIT_CONFIG
    assert "bytes; at most 1073741824 are read" in capsys.readouterr().err
    for option in ("--trace", "--coefficients", "--from-run"):
        given = [*arguments, "--nodes", "1", option, str(tmp_path / "none")]
        assert simulate_cluster.main(given) == simulate_cluster.EXIT_CONFIG
        assert f"{option} {tmp_path / 'none'}" in capsys.readouterr().err
