"""The forecast that ``megatron-rl simulate`` and ``megatron_rl.train --dry-run`` print and write to files.

It has the time that the optimizer steps on one rollout take, and the memory that they need.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_rl.config import Config
from megatron_rl.errors import ConfigError
from megatron_rl.validate.critic import policy_ranks

if TYPE_CHECKING:
    from megatron_rl.simulator.degrees import Degrees
    from megatron_rl.simulator.forecast import Forecast
    from megatron_rl.simulator.job_size import JobSize
    from megatron_rl.simulator.machine import Costs
    from megatron_rl.simulator.placed import PlacedModel
    from megatron_rl.simulator.workload import Workload
    from megatron_rl.weights.model_shape import ModelShape

MAX_ROLLOUTS = 16  # rollouts of a trace, evenly spaced: each is planned several times


def simulate_job(
    config: Config,
    options: argparse.Namespace,
    *,
    size: JobSize | None = None,
    prompt_lengths: Sequence[int] | None = None,
    responses: Sequence[Workload] = (),
) -> str | None:
    """Forecast the optimizer steps on a rollout; print the forecast, and write the files of ``--json`` and ``--svg``.

    size: the number of GPUs; None to take it from the arguments and the environment variables.
    prompt_lengths: tokens of each prompt of a rollout, used if no trace gives the samples.
    responses: the samples of each supervised step. In a run without RL only these are forecast.

    Returns None if the job fits in memory, else a text with settings that fit. Raises ConfigError if a run would.
    """
    from megatron_rl.simulator.degrees import degrees_of
    from megatron_rl.simulator.engine_memory import GIB
    from megatron_rl.simulator.forecast import Job, forecast, with_critic, with_teacher
    from megatron_rl.simulator.job_size import job_size, say_if_assumed
    from megatron_rl.simulator.placed import PlacedModel
    from megatron_rl.simulator.remedies import needs_of, remedies
    from megatron_rl.simulator.table import figures, show
    from megatron_rl.weights.config_json import read_hf_config
    from megatron_rl.weights.model_dtype import settle_dtype

    options = _from_run(options)
    hf_config = read_hf_config(config.model.hf_path, provider=config.model.provider)
    config = dataclasses.replace(config, model=settle_dtype(config.model, hf_config, on_gpu=True))
    size = size or say_if_assumed(job_size(config, options.nodes, options.gpus_per_node))
    degrees = degrees_of(config.parallel, policy_ranks(config.separate_critic_ranks, size.gpus))
    shape = read_shape(config, degrees)
    workloads, source = _workloads(config, options, shape, prompt_lengths, responses)
    loss_share = sum(int(w.loss_tokens.sum()) for w in workloads) / sum(int(w.lengths.sum()) for w in workloads)
    placed = PlacedModel.of(config, shape, degrees)
    costs = _costs(options, placed, config.plan.microbatch_overhead_tokens, loss_share)

    def job_of(workload: Workload) -> Job:
        job = Job(config=config, shape=shape, degrees=degrees, workload=workload, costs=costs)
        return with_teacher(with_critic(job, read_shape), read_shape)

    jobs = [job_of(workload) for workload in workloads]
    forecasts = [forecast(job) for job in jobs]
    # The rollout of median length is shown.
    shown = forecasts[int(np.argsort([f.dense.update_s for f in forecasts])[len(forecasts) // 2])]
    _say_what_is_left_out(critic=config.has_critic, teacher=config.has_teacher, pairs=config.preference.is_on)
    gpu_bytes = options.gpu_memory_gib * GIB
    needing = [_largest_job(jobs, forecasts), *map(job_of, _longest(responses))]  # a supervised start must fit too
    largest = max(needing, key=lambda job: needs_of(job, gpu_bytes).most)
    needs = needs_of(largest, gpu_bytes)
    words = {"title": f"{config.run.name} on {degrees.world_size} GPUs: {degrees.named}", "workload": source}
    content = figures(shown, largest, needs, **words, num_rollouts=len(forecasts), gpu_bytes=gpu_bytes)
    content["model_files"] = _model_files(config, options, shape, degrees, size)
    show(content)
    _write(options, content, shown)
    if not content["shortfalls"]:
        return None
    ways_out = remedies(largest, read_shape, gpu_bytes, size.on_node)
    return _refusal(content["shortfalls"], ways_out)


def _model_files(
    config: Config, options: argparse.Namespace, shape: ModelShape, degrees: Degrees, size: JobSize
) -> dict[str, Any]:
    """Return {name: number}: the predicted bytes, files and seconds of loading and exporting the policy's weights."""
    from megatron_rl.model.seam_fields import DTYPES
    from megatron_rl.simulator.model_files import GB, count_model_files
    from megatron_rl.weights.file_plan import FileSizes, plan_files

    if options.host_gb_per_s <= 0:
        raise ConfigError(f"--host-gb-per-s {options.host_gb_per_s} must be above 0: 1e9 bytes a second of a host")
    plan = plan_files(shape, degrees, DTYPES[config.model.dtype], FileSizes())
    counted = count_model_files(shape, degrees, plan, size.on_node)
    return counted.figures(options.host_gb_per_s * GB)


def _write(options: argparse.Namespace, content: dict[str, Any], shown: Forecast) -> None:
    """Write the figures ``content`` to the file of ``--json``, and a picture of ``shown`` to the file of ``--svg``.

    Each file is written only if its option is given.
    """
    from megatron_rl.simulator.picture import picture

    if options.json:
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(f"written: {options.json}")
    if options.svg:
        options.svg.write_text(picture(shown, content["title"]), encoding="utf-8")
        print(f"written: {options.svg}")


def _refusal(shortfalls: Sequence[str], ways_out: Sequence[str]) -> str:
    would_fit = (
        f"It would fit with: {' | '.join(ways_out)}"
        if ways_out
        else "No setting and no other topology of as many GPUs was found to fit, even with full recompute and "
        "bfloat16; take more GPUs (--nodes) or a smaller model"
    )
    return f"the job does not fit: {'; '.join(shortfalls)}. {would_fit} (docs/tuning.md)"


def _say_what_is_left_out(*, critic: bool, teacher: bool, pairs: bool) -> None:
    if critic:
        print("critic: its memory is in this forecast, and its time is not", file=sys.stderr)
    if teacher:
        print("teacher: its weights are in this forecast, and its passes' time is not", file=sys.stderr)
    if pairs:
        print("pairs: the passes that score them before each step are not in the forecast's time", file=sys.stderr)


def _from_run(options: argparse.Namespace) -> argparse.Namespace:
    """Return the options with ``--from-run FOLDER`` replaced by ``--trace FOLDER --coefficients FOLDER``."""
    if options.from_run is None:
        return options
    repeated = [
        option for option, value in {"--trace": options.trace, "--coefficients": options.coefficients}.items() if value
    ]
    if repeated:
        raise ConfigError(
            f"--from-run {options.from_run} stands for --trace and --coefficients, and {' and '.join(repeated)} is "
            "given too; drop one"
        )
    if not os.path.isdir(options.from_run):
        raise ConfigError(
            f"--from-run {options.from_run} is no folder; give the one that holds the run's trace.jsonl and "
            "coefficients.json"
        )
    return argparse.Namespace(**vars(options) | {"trace": options.from_run, "coefficients": options.from_run})


def read_shape(config: Config, degrees: Degrees, value_head: bool = False) -> ModelShape:
    """Return the ModelShape of ``model.hf_path``; only its config.json is read.

    degrees: the degrees of parallelism, over which the layers are divided.
    value_head: whether the model has a value head in place of the LM head, as a critic has.
    """
    from megatron_rl.backend.megatron_ddp import REFUSED_DDP_FIELDS
    from megatron_rl.backend.trainable_model import DistributedDataParallelConfig
    from megatron_rl.model.hf_config import model_shape
    from megatron_rl.model.megatron_fields import resolve_fields
    from megatron_rl.model.settings import ModelSettings
    from megatron_rl.model.transformer_fields import transformer_fields
    from megatron_rl.validate import check_lengths
    from megatron_rl.weights.config_json import read_hf_config

    hf_config = read_hf_config(config.model.hf_path, provider=config.model.provider)
    value_head = value_head or config.trains_reward_model
    # torch's layers, unless Transformer Engine's are asked for by name
    layer_spec = "transformer_engine" if config.model.layer_spec == "transformer_engine" else "torch"
    shape = model_shape(hf_config, ModelSettings.of(config), degrees, layer_spec=layer_spec, value_head=value_head)
    if config.generates:
        check_lengths(config.data, config.rollout, shape.context_tokens)
    transformer_fields(config.megatron.transformer, lora_rank=config.lora.rank)
    resolve_fields(config.megatron.ddp, DistributedDataParallelConfig, "megatron.ddp", REFUSED_DDP_FIELDS)
    return shape


def _largest_job(jobs, forecasts):
    """Return the job that has the pipeline stage with the most memory.

    jobs: a list of Jobs.
    forecasts: the Forecast of each job, in the same order.
    """
    return max(zip(jobs, forecasts, strict=True), key=lambda pair: max(stage.total for stage in pair[1].memory))[0]


def _workloads(
    config: Config,
    options: argparse.Namespace,
    shape: ModelShape,
    prompt_lengths: Sequence[int] | None,
    responses: Sequence[Workload],
) -> tuple[Sequence[Workload], str]:
    from megatron_rl.simulator.workload import draw, read_trace

    drawn = {"--lengths": options.lengths, "--pass-rate": options.pass_rate, "--prompt-tokens": options.prompt_tokens}
    # Without a trace: the supervised steps of the data, or drawn samples.
    chosen = [option for option, value in drawn.items() if value]
    if config.train.num_rollouts == 0 and responses and options.trace is None and not chosen:
        some = _evenly(responses)
        rows = "pairs" if config.preference.is_on else "rows"
        return some, f"{len(some)} of {len(responses)} steps of {config.sft.samples_per_step} {rows} of data.train"
    if options.trace is None:
        workload, source = draw(
            config,
            lengths=options.lengths,
            pass_rate=options.pass_rate,
            prompt_tokens=options.prompt_tokens or prompt_lengths,
            seed=config.run.seed,
            context_tokens=shape.context_tokens,
        )
        return [workload], source
    # With a trace: its rollouts, evenly spaced.
    if chosen:
        raise ConfigError(
            f"--trace {options.trace} and {' and '.join(chosen)} both describe the samples; give one of them"
        )
    recorded = read_trace(options.trace)
    workloads = _evenly(recorded)
    count = config.train.prompts_per_rollout * config.rollout.samples_per_prompt
    some = f"{len(workloads)} of " if len(workloads) < len(recorded) else ""
    source = (
        f"recorded: {some}{len(recorded)} rollout(s) of {len(workloads[0].rewards)} samples, from "
        f"{pathlib.Path(options.trace).name}"
    )
    return workloads, source + (f" (the configuration asks for {count})" if count != len(workloads[0].rewards) else "")


def _evenly(recorded: Sequence[Workload]) -> list[Workload]:
    chosen = np.unique(np.linspace(0, len(recorded) - 1, min(len(recorded), MAX_ROLLOUTS)).round().astype(int))
    return [recorded[i] for i in chosen]


def _longest(steps: Sequence[Workload]) -> list[Workload]:
    """Return a list with the supervised step that has the longest sample; [] without steps."""
    return sorted(steps, key=lambda step: step.lengths.max())[-1:]


def _costs(options: argparse.Namespace, placed: PlacedModel, overhead_tokens: float, loss_share: float) -> Costs:
    from megatron_rl.simulator.machine import assumed_flops, load_coefficients, machine_costs, stated_machine

    if options.coefficients:
        return load_coefficients(options.coefficients, placed, loss_share=loss_share)
    flops, source = (
        (options.flops, f"stated: {options.flops:.3g} FLOP/s per GPU") if options.flops else assumed_flops(placed.shape)
    )
    machine = stated_machine(flops, placed, overhead_tokens)
    source += " in the prior's proportions; not measured"
    return machine_costs(machine, placed, loss_share=loss_share, source=source)
