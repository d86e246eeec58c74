"""simulate/: memory against built models, plans against the backend's, the clock's arithmetic, and the two command
lines."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import torch

from megatron_rl import cli, train
from megatron_rl.config import load_config
from megatron_rl.errors import ConfigError
from megatron_rl.model.build import model_shape
from megatron_rl.planning.cost import CostModel, StageCost
from megatron_rl.planning.plan import plan_rules
from megatron_rl.simulator.degrees import degrees_of, world_size
from megatron_rl.simulator.forecast import Job, forecast
from megatron_rl.simulator.machine import Costs, Machine, load_coefficients, machine_costs, stated_machine
from megatron_rl.simulator.memory import kept_elements, stage_memory, stage_parameters
from megatron_rl.simulator.picture import picture
from megatron_rl.simulator.workload import Workload, append_trace, draw, read_trace
from tests.equality.rig import DEFAULTS, layers_of, open_rig, ragged_advantages
from tests.patience import patient
from tests.reference import tiny_config
from tools import simulate_cluster

# ---- against what is really built
# --------------------------------------------------------------------------------------

SPLITS = {
    "TP2": ("qwen2_untied", "parallel.tensor=2", "parallel.sequence_parallel=true"),
    "PP2, tied": ("qwen2_tied", "parallel.pipeline=2"),
    "PP2 VPP2": ("qwen3", "parallel.pipeline=2", "parallel.virtual_pipeline=2"),
    "EP2": ("mixtral", "parallel.expert=2"),
    "TP2 ETP1": ("qwen3_moe", "parallel.tensor=2", "parallel.sequence_parallel=true", "parallel.expert_tensor=1"),
    "DP2, sharded": ("llama", "optimizer.distributed=true"),
    "PP2, second model": (
        "qwen2_tied",
        "parallel.pipeline=2",
        "loss.kl_coefficient=0.1",
        "skip.mode=off",
        "reference.placement=device",
    ),
    "TP2, adapters": ("qwen3", "parallel.tensor=2", "lora.rank=3"),
    "PP2 VPP2, adapters": (
        "qwen2_tied",
        "parallel.pipeline=2",
        "parallel.virtual_pipeline=2",
        "lora.rank=3",
        "lora.targets=[linear_fc1]",
    ),
}


def built(rank: int, world: int, family: str, *overrides: str) -> dict:
    """What a rank of a real backend holds and plans."""
    values = ragged_advantages(24)
    with open_rig(family, *overrides, samples=24) as rig:
        plan = rig.plan(values, drops=True)
        rig.step(values, drops=True)
        parameters = [p for chunk in rig.backend.chunks for p in chunk.parameters()]
        rig.backend.keep_reference()
        kept = rig.backend.reference.tensors if rig.backend.config.reference.placement == "device" else []
        second = sum(x.numel() * x.element_size() for x in kept)
        moments = 0
        for part in rig.backend.optimizer.megatron.chained_optimizers:
            for state in part.optimizer.state.values():
                moments += sum(state[name].numel() * state[name].element_size() for name in ("exp_avg", "exp_avg_sq"))
        facts = rig.batch.facts
        return {
            "weights": sum(p.numel() * p.element_size() for p in parameters),
            "gradients": sum(p.main_grad.numel() * 4 for p in parameters if p.requires_grad),
            "moments": moments,
            "reference": second,
            "stage": rig.backend.topology.pipeline_rank,
            "fingerprints": plan.fingerprints(),
            "prior": plan_rules(rig.backend.config, rig.backend.topology, rig.backend.shape),
            "signal": values != 0,
            "prompt": facts.prompt_tokens,
            "response": facts.response_tokens,
        }


@pytest.mark.parametrize("split", SPLITS)
def test_memory_and_plan_equal_the_backends(pool, split: str) -> None:
    """Bytes of weights, a second model's too, and gradients exactly, on every rank; moments over all ranks; rules and
    plan by value."""
    family, *overrides = SPLITS[split]
    config = load_config(None, [*DEFAULTS, *overrides])
    degrees = degrees_of(config, 2)
    shape = model_shape(tiny_config(family, layers=layers_of(config)), config, degrees, layer_spec="torch")
    found = pool.run(2, built, family, *overrides, timeout_s=120)
    predicted = [
        stage_memory(shape, config, degrees, rank["stage"], tokens=40, loss_tokens=20, microbatches=4) for rank in found
    ]
    assert [x.weights for x in predicted] == [rank["weights"] for rank in found]
    assert [x.reference for x in predicted] == [rank["reference"] for rank in found]
    assert [x.gradients for x in predicted] == [rank["gradients"] for rank in found]
    assert sum(x.optimizer for x in predicted) == sum(rank["moments"] for rank in found)
    first = found[0]
    workload = Workload(
        prompt_tokens=first["prompt"],
        response_tokens=first["response"],
        loss_tokens=first["response"],
        rewards=np.zeros(24),
        groups=np.zeros(24, dtype=np.int64),
    )
    job = job_of(config, shape, degrees, workload)
    assert job.rules() == first["prior"]
    assert job.plan(job.rules(), first["signal"], drops=True).fingerprints() == first["fingerprints"]


def saved_bytes(rank: int, world: int, family: str, layers: int) -> tuple[int, int]:
    """(bytes that autograd saves in one micro-batch's forward, weights not counted; its tokens)."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    values = ragged_advantages(8)
    with open_rig(family, "plan.max_tokens_per_microbatch=4096", samples=8, layers=layers) as rig:
        plan = rig.plan(values, drops=False)
        weights = {p.untyped_storage().data_ptr() for chunk in rig.backend.chunks for p in chunk.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            rig.accumulate(values, plan)
        return sum(size for pointer, size in kept.items() if pointer not in weights), int(
            rig.batch.facts.total_tokens.sum()
        )


@pytest.mark.parametrize("family", ["qwen2_tied", "qwen3"])
def test_activations_are_what_autograd_saves(pool, family: str) -> None:
    """Per layer, in float32, by the difference between four layers and two. Within 5 %: the attention here pads
    sequences to the longest of a few, and norms keep a number per token."""
    (deep, tokens), (shallow, _) = (pool.run(1, saved_bytes, family, layers, timeout_s=60)[0] for layers in (4, 2))
    config = load_config(None, list(DEFAULTS))
    degrees = degrees_of(config, 1)
    shape = model_shape(tiny_config(family), config, degrees, layer_spec="torch")
    assert 4 * tokens * kept_elements(shape, config, degrees) == pytest.approx((deep - shallow) / 2, rel=0.05)


# ---- the clock
# ---------------------------------------------------------------------------------------------------------


def job_of(config, shape, degrees, workload: Workload, costs: Costs | None = None) -> Job:
    machine = stated_machine(1e12, shape, config, degrees)
    return Job(
        config=config,
        shape=shape,
        degrees=degrees,
        workload=workload,
        costs=costs or machine_costs(machine, shape, config, degrees, loss_share=0.8, source="stated"),
    )


def equal_samples(count: int, tokens: int, dead: int = 0) -> Workload:
    """Groups of two, the first ``dead`` of them with equal rewards."""
    rewards = np.where(np.arange(count) // 2 < dead, 1.0, np.arange(count) % 2)
    return Workload(
        prompt_tokens=np.full(count, tokens // 4),
        response_tokens=np.full(count, tokens - tokens // 4),
        loss_tokens=np.full(count, tokens - tokens // 4),
        rewards=rewards,
        groups=np.arange(count) // 2,
    )


def tiny_job(workload: Workload, world: int, *overrides: str, costs: Costs | None = None, family: str = "qwen3") -> Job:
    config = load_config(None, ["plan.max_tokens_per_microbatch=40", *overrides])
    degrees = degrees_of(config, world)
    shape = model_shape(tiny_config(family, layers=8), config, degrees, layer_spec="torch")
    return job_of(config, shape, degrees, workload, costs)


def per_token(stages: int, virtual: int = 1) -> Costs:
    """One second a token on every stage, a third of it forward; an optimizer step of 7 s."""
    model = CostModel(stages=(StageCost(overhead=0.0, token=1.0, square=0.0),) * stages, virtual=virtual)
    return Costs(model=model, forward_share=1 / 3, optimizer_s=7.0, source="test")


def test_equal_samples_take_what_the_pipeline_takes() -> None:
    """16 samples of 40 tokens, one in each micro-batch, on PP4 x DP2: (8 + 4 - 1) slots of 40 s; half dead: (4 + 3)
    slots."""
    found = forecast(tiny_job(equal_samples(16, 40, dead=4), 8, "parallel.pipeline=4", costs=per_token(4)))
    assert found.dense.update_s == pytest.approx(11 * 40 + 7, rel=1e-12) and found.skip.update_s == pytest.approx(
        7 * 40 + 7, rel=1e-12
    )
    assert found.ideal == 2.0 and found.gain == pytest.approx(447 / 287, rel=1e-12) and found.dense.imbalance == 0.0
    np.testing.assert_allclose(found.dense.bubble_share, 3 / 11, rtol=1e-12)
    interleaved = forecast(
        tiny_job(
            equal_samples(16, 40),
            8,
            "parallel.pipeline=4",
            "parallel.virtual_pipeline=2",
            costs=per_token(4, virtual=2),
        )
    )
    assert interleaved.dense.update_s == pytest.approx((8 * 2 + 3) * 20 + 7, rel=1e-12)


def test_nothing_dead_gains_nothing_and_all_dead_is_a_ghost() -> None:
    alive = forecast(tiny_job(equal_samples(8, 20), 2))
    assert (
        alive.gain == 1.0 and alive.ideal == 1.0 and alive.skip.plan.fingerprints() == alive.dense.plan.fingerprints()
    )
    ghost = forecast(tiny_job(equal_samples(8, 20, dead=4), 2, costs=per_token(1)))
    assert (
        ghost.ideal is None
        and ghost.skip.count("ghosts") == 1
        and ghost.skip.update_s == 7.0
        and ghost.skip.drawn is None
    )
    off = forecast(tiny_job(equal_samples(8, 20, dead=2), 2, "skip.mode=off"))
    assert off.gain == 1.0


def test_what_binds_is_named() -> None:
    """Experts over two replicas, one long sample each: the lockstep costs what the longer one takes beyond the
    shorter."""
    workload = dataclasses.replace(equal_samples(4, 20), response_tokens=np.array([15, 15, 15, 95]))
    found = forecast(tiny_job(workload, 2, "parallel.expert=2", family="mixtral", costs=per_token(1)))
    names = {x.name for x in found.constraints}
    assert {"EP lockstep", "longest sample", "token cap", "optimizer step"} <= names and found.dense.count(
        "num_fillers"
    ) == 1
    assert found.constraints[0].name == "longest sample"
    wide = forecast(
        tiny_job(equal_samples(12, 40), 4, "parallel.pipeline=4", "parallel.virtual_pipeline=2", costs=per_token(4, 2))
    )
    assert {"VPP multiple", "pipeline bubble", "uneven stages"} <= {x.name for x in wide.constraints}
    assert wide.constraints[0].name == "pipeline bubble"


def test_replicas_that_share_experts_wait_for_each_other() -> None:
    """Micro-batches of one sample: replica 0 runs 10 and 40 tokens, replica 1 runs 30 and 25. Together 30 + 40, apart
    the longer 55."""
    workload = dataclasses.replace(
        equal_samples(4, 20), prompt_tokens=np.full(4, 5), response_tokens=np.array([5, 25, 35, 20])
    )
    for expert, seconds in ((2, 70), (1, 55)):
        found = forecast(
            tiny_job(
                workload,
                2,
                f"parallel.expert={expert}",
                "plan.samples_per_microbatch=1",
                family="mixtral",
                costs=per_token(1),
            )
        )
        assert found.dense.update_s == pytest.approx(seconds + 7, rel=1e-12)


def test_thousands_of_gpus_take_seconds() -> None:
    """4,096 GPUs, 16,384 samples, four mini-batches: planned and put on the clock several times over."""
    config = load_config(
        None,
        [
            "parallel.tensor=4",
            "parallel.sequence_parallel=true",
            "parallel.pipeline=8",
            "train.prompts_per_rollout=1024",
            "rollout.samples_per_prompt=16",
            "train.samples_per_mini_batch=4096",
            "rollout.max_response_tokens=4096",
        ],
    )
    degrees = degrees_of(config, 4096)
    hf_config = tiny_config("qwen2_untied", layers=32)
    hf_config.num_key_value_heads = 4
    shape = model_shape(hf_config, config, degrees, layer_spec="torch")
    workload, _ = draw(config, lengths=None, pass_rate=None, prompt_tokens=None, seed=0)
    started = time.perf_counter()
    found = forecast(job_of(config, shape, degrees, workload))
    assert time.perf_counter() - started < patient(300)  # 8 s on a loaded host
    assert found.dense.update_s >= found.skip.update_s > 0 and 1 <= found.gain <= found.ideal * 1.2


# ---- workloads, coefficients
# -------------------------------------------------------------------------------------------


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
    """Tokens with loss default to the response's; a line that was cut off while it was written is left out, and
    said."""
    wanted = equal_samples(4, 20)
    rows = zip(
        wanted.prompt_tokens.tolist(),
        wanted.response_tokens.tolist(),
        wanted.rewards.tolist(),
        wanted.groups.tolist(),
        strict=True,
    )
    lines = [
        json.dumps(dict(zip(("prompt_tokens", "response_tokens", "reward", "group"), row, strict=True))) for row in rows
    ]
    (tmp_path / "by_sample.jsonl").write_text("\n".join([*lines, lines[0][:20]]))
    append_trace(tmp_path / "trace.jsonl", 7, wanted)
    assert len((tmp_path / "trace.jsonl").read_text().splitlines()) == 1
    for name in ("by_sample.jsonl", "trace.jsonl"):
        (found,) = read_trace(tmp_path / name)
        for field in dataclasses.fields(Workload):
            np.testing.assert_array_equal(getattr(found, field.name), getattr(wanted, field.name))
    assert "by_sample.jsonl:5 is cut off and was left out" in caplog.text


@pytest.mark.parametrize(
    ("again", "message"),
    [
        ({}, "trace.jsonl:2: rollout 1 came before"),
        ({"rollout": 2, "reward": [1.0]}, "lists of different lengths: .*'reward': 1"),
        ({"rollout": 2, "group": ["x"] * 4}, "ValueError"),
        ({"rollout": 2, "prompt_tokens": [None] * 4}, "cannot convert float NaN to integer"),
    ],
)
def test_a_line_that_is_no_rollout_is_named(tmp_path: pathlib.Path, again: dict, message: str) -> None:
    file = tmp_path / "trace.jsonl"
    append_trace(file, 1, equal_samples(4, 20))
    file.write_text(file.read_text() + json.dumps(json.loads(file.read_text()) | again) + "\n")
    with pytest.raises(ConfigError, match=message):
        read_trace(file)


def test_gdpo_reads_each_functions_rewards(tmp_path: pathlib.Path) -> None:
    """Two functions that disagree and whose weighted sum is the same: signal under gdpo alone."""
    by_function = {"a:f": np.array([1.0, 0.0]), "b:g": np.array([0.0, 2.0])}
    append_trace(
        tmp_path / "trace.jsonl",
        1,
        dataclasses.replace(equal_samples(2, 20), rewards=np.ones(2), by_function=by_function),
    )
    (found,) = read_trace(tmp_path)
    given = ["reward.functions=[a:f,b:g]", "reward.weights=[1.0,0.5]"]
    assert (
        found.signal(load_config(None, [*given, "advantage.estimator=gdpo"])).all()
        and not found.signal(load_config(None, given)).any()
    )
    with pytest.raises(ConfigError, match=r"reward.functions=\['a:h'\] and the trace has those of \['a:f', 'b:g'\]"):
        found.signal(load_config(None, ["reward.functions=[a:h]", "advantage.estimator=gdpo"]))


def test_draws_have_the_stated_means() -> None:
    """Of 40,000 lengths and 10,000 prompts: within 2 %, four standard errors."""
    config = load_config(
        None, ["train.prompts_per_rollout=10000", "rollout.samples_per_prompt=4", "rollout.max_response_tokens=100000"]
    )
    workload, said = draw(config, lengths="lognormal:800,0.6", pass_rate="beta:2,3", prompt_tokens=50, seed=0)
    assert workload.response_tokens.mean() == pytest.approx(800, rel=0.02) and workload.rewards.mean() == pytest.approx(
        0.4, rel=0.02
    )
    assert "lognormal:800,0.6" in said and "beta:2,3" in said


def test_signal_is_the_runs_own() -> None:
    workload = equal_samples(8, 20, dead=2)
    assert workload.signal(load_config(None)).tolist() == [False] * 4 + [True] * 4


def test_coefficients_of_a_run_and_of_a_machine(tmp_path: pathlib.Path) -> None:
    job = tiny_job(equal_samples(8, 20), 2, "parallel.pipeline=2")
    machine = Machine(
        flops_per_s=1e9,
        attention_flops_per_s=5e8,
        layer_overhead_s=1e-3,
        adam_s=1e-9,
        reduce_s=2e-9,
        update_overhead_s=0.1,
    )
    file = tmp_path / "coefficients.json"
    file.write_text(json.dumps({"machine": dataclasses.asdict(machine), "measured_on": "a laptop"}))
    read = load_coefficients(file, job.shape, job.config, job.degrees, loss_share=0.8)
    assert read.model == machine_costs(machine, job.shape, job.config, job.degrees, loss_share=0.8, source="").model
    assert read.source == "coefficients of coefficients.json: a laptop"
    dense = stage_parameters(job.shape, job.degrees, 1)[0]
    assert read.optimizer_s == pytest.approx(0.1 + 1e-9 * dense)  # one replica: nothing is reduced
    stage = {"overhead": 0.1, "token": 1e-3, "square": 0.0}
    file.write_text(json.dumps({"stages": [stage, stage], "virtual": 1, "optimizer_s": 0.5}))
    assert load_coefficients(file, job.shape, job.config, job.degrees, loss_share=0.8).from_run
    file.write_text(json.dumps({"stages": [stage], "virtual": 1, "optimizer_s": 0.5}))
    with pytest.raises(
        ConfigError, match="fitted with 1 pipeline stages of 1 chunks and this configuration has 2 of 1"
    ):
        load_coefficients(file, job.shape, job.config, job.degrees, loss_share=0.8)


def test_world_size_is_said_by_somebody() -> None:
    assert world_size(4, None, {}) == 32 and world_size(None, None, {"WORLD_SIZE": "6"}) == 6
    assert world_size(None, None, {"SLURM_NNODES": "3", "SLURM_GPUS_ON_NODE": "4"}) == 12
    with pytest.raises(ConfigError, match="add --nodes N"):
        world_size(None, None, {})
    with pytest.raises(ConfigError, match="world size 6 is no multiple of"):
        degrees_of(load_config(None, ["parallel.pipeline=4"]), 6)


# ---- command lines
# -----------------------------------------------------------------------------------------------------


@pytest.fixture
def arguments(tmp_path: pathlib.Path) -> list[str]:
    tiny_config("qwen3", layers=8).save_pretrained(tmp_path / "model")
    return [
        f"model.hf_path={tmp_path / 'model'}",
        "parallel.pipeline=4",
        "plan.max_tokens_per_microbatch=256",
        "data.max_prompt_tokens=64",
        "rollout.max_response_tokens=128",
        "reward.functions=[arithmetic]",
    ]


def test_the_tool_prints_and_writes(arguments, tmp_path: pathlib.Path, capsys) -> None:
    svg, written = tmp_path / "pipeline.svg", tmp_path / "figures.json"
    assert simulate_cluster.main(["--nodes", "2", "--svg", str(svg), *arguments, "--json", str(written)]) == 0
    printed, content = capsys.readouterr().out, json.loads(written.read_text())
    assert "TP 1, PP 4, DP 4" in printed and "not measured" in printed and "binds: " in printed
    assert content["world_size"] == 16 and len(content["memory"]) == 4 and content["gain_predicted"] > 1
    assert content["dense"]["update_s"] == pytest.approx(
        content["dense"]["pipeline_s"] + content["dense"]["optimizer_s"]
    )
    assert ElementTree.fromstring(svg.read_text()).tag.endswith("svg")


def test_the_picture_has_a_box_for_every_operation() -> None:
    found = forecast(tiny_job(equal_samples(16, 40, dead=4), 8, "parallel.pipeline=4", costs=per_token(4)))
    boxes = [
        x.get("class") for x in ElementTree.fromstring(picture(found, "a <title>")).iter() if x.tag.endswith("rect")
    ]
    assert boxes.count("forward") - 1 == boxes.count("backward") - 1 == 4 * (8 + 4)  # one each is the legend's
    assert (
        boxes.count("dead") - 1 == 2 * 4 * 4 and boxes.count("saved") == 1
    )  # half of the dense run's, and what the skip saves


def test_a_dry_run_of_training_joins_nothing(arguments, capsys, monkeypatch) -> None:
    monkeypatch.setattr(train, "train", lambda config: pytest.fail("a dry run must not train"))
    assert train.main([*arguments, "--dry-run", "--nodes", "1"]) == 0
    assert "PP 4, DP 2" in capsys.readouterr().out and not torch.distributed.is_initialized()
    monkeypatch.setenv("WORLD_SIZE", "12")
    assert train.main([*arguments, "--dry-run"]) == 0
    assert "PP 4, DP 3" in capsys.readouterr().out
    separate = ("advantage.estimator=gae", "critic.placement=separate", "critic.ranks=4")
    assert train.main([*arguments, *separate, "--dry-run"]) == 0  # every sample trains, and four ranks hold no policy
    said = capsys.readouterr()
    assert "PP 4, DP 2" in said.out and "critic: neither its time" in said.err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--nodes", "1", "parallel.pipeline=3"], "world size 8 is no multiple of"),
        (["--nodes", "3", "parallel.pipeline=3"], "does not divide num_hidden_layers=8"),
        (["--nodes", "1", "loss.kl_coefficient=0.1"], "skip.mode=exact"),
        (["--nodes", "1", "plan.max_token=3"], "the nearest known key is plan.max_tokens_per_microbatch"),
        (["--nodes", "1", "--lengths", "uniform:3"], "is not of the form lognormal:MEAN,SIGMA"),
        (["--nodes", "1", "megatron.transformer.num_layers=3"], "is refused"),
        (["--nodes", "1", "rollout.max_response_tokens=5000"], "5000"),
        ([], "add --nodes N"),
    ],
)
def test_what_cannot_work_is_said_as_training_says_it(arguments, more, message, capsys, monkeypatch) -> None:
    for name in ("WORLD_SIZE", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)
    assert train.main([*arguments, "--dry-run", *more]) == cli.EXIT_CONFIG
    assert message in capsys.readouterr().err


def test_a_trace_forecasts_as_its_samples_do(arguments, tmp_path: pathlib.Path, capsys) -> None:
    """The rollout of median update time, and an error for a line that is no sample, and for two sources at once."""
    config = load_config(None, arguments)
    trace, written = tmp_path / "trace.jsonl", tmp_path / "figures.json"
    for rollout, mean in enumerate((40, 80, 60)):
        append_trace(
            trace, rollout, draw(config, lengths=f"lognormal:{mean},0.3", pass_rate=None, prompt_tokens=9, seed=0)[0]
        )
    command = [*arguments, "--nodes", "1", "--trace", str(trace), "--json", str(written)]
    assert simulate_cluster.main(command) == 0
    lengths = read_trace(trace)[2].lengths
    assert (
        json.loads(written.read_text())["dense"]["tokens"] == lengths.sum()
        and "recorded: 3 rollout(s)" in capsys.readouterr().out
    )
    assert simulate_cluster.main([*command, "--pass-rate", "beta:1,1"]) == simulate_cluster.EXIT_CONFIG
    trace.write_text('{"prompt_tokens": 3}\n')
    assert simulate_cluster.main(command) == simulate_cluster.EXIT_CONFIG
    assert "trace.jsonl:1: " in capsys.readouterr().err
    for option in ("--trace", "--coefficients", "--from-run"):
        assert (
            simulate_cluster.main([*arguments, "--nodes", "1", option, str(tmp_path / "none")])
            == simulate_cluster.EXIT_CONFIG
        )
        assert f"{option} {tmp_path / 'none'}" in capsys.readouterr().err
