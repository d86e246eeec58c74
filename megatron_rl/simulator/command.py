"""Holds the arguments and output that ``megatron-rl simulate`` and ``megatron_rl.train --dry-run`` share."""

from __future__ import annotations

import argparse
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
    from megatron_rl.simulator.forecast import Forecast
    from megatron_rl.simulator.job_size import JobSize
    from megatron_rl.simulator.workload import Workload
    from megatron_rl.weights.model_shape import ModelShape

MAX_ROLLOUTS = 16  # of a trace, evenly spaced: each is planned several times


def add_arguments(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the simulation's own arguments, which are not in the configuration."""
    parser.add_argument(
        "--nodes",
        type=int,
        help="nodes of the job; without it WORLD_SIZE or SLURM's variables say, else one is assumed",
    )
    parser.add_argument("--gpus-per-node", type=int, help="default 8, or SLURM_GPUS_ON_NODE")
    parser.add_argument(
        "--from-run", metavar="FOLDER", help="a run's folder: --trace and --coefficients by the files that it wrote"
    )
    parser.add_argument(
        "--trace", help="lengths and rewards per sample: a JSONL file, or a run's folder with trace.jsonl"
    )
    parser.add_argument(
        "--lengths", help="lognormal:MEAN,SIGMA of response tokens, without --trace; default half the limit, 0.5"
    )
    parser.add_argument(
        "--pass-rate", help="beta:A,B of each prompt's chance of reward 1, without --trace; default beta:0.5,0.5"
    )
    parser.add_argument(
        "--prompt-tokens", type=int, help="of each prompt, without --trace; default half of data.max_prompt_tokens"
    )
    parser.add_argument(
        "--coefficients", help="JSON, or a run's folder: its fitted stages, or a machine's rates; without it --flops"
    )
    parser.add_argument(
        "--flops", type=float, help="FLOP/s of one GPU in matrix products, stated; default 4e14, of a mixture 2.7e14"
    )
    parser.add_argument("--gpu-memory-gib", type=float, default=80.0, help="of one GPU; default 80")
    parser.add_argument("--svg", type=pathlib.Path, help="write a picture of the pipeline, dense and skip, there")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures there")


def simulate_job(
    config: Config,
    given: argparse.Namespace,
    *,
    size: JobSize | None = None,
    prompt_lengths: Sequence[int] | None = None,
    responses: Sequence[Workload] = (),
) -> str | None:
    """Forecast the configuration's update, print it, and write the files that the arguments ask for.

    size: the job's GPUs; None: by the arguments and this process's variables.
    prompt_lengths: tokens of the prompts of a rollout, for a workload that is drawn.
    responses: the supervised steps on the run's data; they are all that is forecast where no rollout is trained.
    Returns None, or the sentence that says why the job does not fit on its GPUs, and what would make it fit.
    Raises ConfigError as training would.
    """
    from megatron_rl.simulator.degrees import degrees_of
    from megatron_rl.simulator.engine_memory import GIB
    from megatron_rl.simulator.forecast import Job, forecast, with_critic, with_teacher
    from megatron_rl.simulator.remedies import needs_of, remedies
    from megatron_rl.simulator.table import figures, show
    from megatron_rl.weights.config_json import read_hf_config
    from megatron_rl.weights.model_dtype import settle_dtype

    given = _from_run(given)
    config = settle_dtype(config, read_hf_config(config.model.hf_path, provider=config.model.provider), on_gpu=True)
    size = size or stated_or_assumed(config, given)
    degrees = degrees_of(config, policy_ranks(config, size.gpus))
    shape = read_shape(config, degrees)
    workloads, source = _workloads(config, given, shape, prompt_lengths, responses)
    loss_share = sum(int(w.loss_tokens.sum()) for w in workloads) / sum(int(w.lengths.sum()) for w in workloads)
    costs = _costs(config, given, shape, degrees, loss_share)

    def job_of(workload: Workload) -> Job:
        job = Job(config=config, shape=shape, degrees=degrees, workload=workload, costs=costs)
        return with_teacher(with_critic(job, read_shape), read_shape)

    jobs = [job_of(workload) for workload in workloads]
    forecasts = [forecast(job) for job in jobs]
    # The rollout of median length is shown.
    shown = forecasts[int(np.argsort([f.dense.update_s for f in forecasts])[len(forecasts) // 2])]
    _say_what_is_left_out(config)
    title = f"{config.run.name} on {degrees.world_size} GPUs: {degrees.named}"
    gpu_bytes = given.gpu_memory_gib * GIB
    needing = [_largest_job(jobs, forecasts), *map(job_of, _longest(responses))]  # a supervised start must fit too
    largest = max(needing, key=lambda job: needs_of(job, gpu_bytes).most)
    needs = needs_of(largest, gpu_bytes)
    words = {"title": title, "workload": source}
    content = figures(shown, config, degrees, needs, **words, num_rollouts=len(forecasts), gpu_bytes=gpu_bytes)
    show(content)
    _write(given, content, shown)
    if not content["shortfalls"]:
        return None
    ways_out = remedies(largest, read_shape, gpu_bytes, size.on_node)
    return _refusal(content["shortfalls"], ways_out)


def _write(given: argparse.Namespace, content: dict[str, Any], shown: Forecast) -> None:
    """Write the files that the arguments ask for."""
    from megatron_rl.simulator.picture import picture

    if given.json:
        given.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(f"written: {given.json}")
    if given.svg:
        given.svg.write_text(picture(shown, content["title"]), encoding="utf-8")
        print(f"written: {given.svg}")


def _refusal(shortfalls: Sequence[str], ways_out: Sequence[str]) -> str:
    would_fit = (
        f"It would fit with: {' | '.join(ways_out)}"
        if ways_out
        else "No setting and no other degrees on as many GPUs that were tried are enough, with full recompute and "
        "bfloat16: more GPUs (--nodes), or a smaller model, would be"
    )
    return f"the job does not fit: {'; '.join(shortfalls)}. {would_fit} (docs/it-does-not-fit.md)"


def stated_or_assumed(config: Config, given: argparse.Namespace, *, host_gpus: int = 0) -> JobSize:
    """Return the job's GPUs, with a line on stderr where they are assumed. host_gpus: those of this host."""
    from megatron_rl.simulator.job_size import job_size

    size = job_size(config, given.nodes, given.gpus_per_node, os.environ, host_gpus=host_gpus)
    if size.assumed:
        print(f"note: {size.assumed}", file=sys.stderr)
    return size


def _say_what_is_left_out(config: Config) -> None:
    if config.has_critic:
        print("critic: its memory is in this forecast, and its time is not", file=sys.stderr)
    if config.has_teacher:
        print("teacher: its weights are in this forecast, and its passes' time is not", file=sys.stderr)
    if config.preference.is_on:
        print("pairs: the passes that score them before each step are not in the forecast's time", file=sys.stderr)


def _from_run(given: argparse.Namespace) -> argparse.Namespace:
    """Replace ``--from-run`` by the two options for which it stands."""
    if given.from_run is None:
        return given
    repeated = [
        option for option, value in {"--trace": given.trace, "--coefficients": given.coefficients}.items() if value
    ]
    if repeated:
        raise ConfigError(
            f"--from-run {given.from_run} stands for --trace and --coefficients, and {' and '.join(repeated)} is given "
            "too; drop one"
        )
    if not os.path.isdir(given.from_run):
        raise ConfigError(
            f"--from-run {given.from_run} is no folder; give the one that holds the run's trace.jsonl and "
            "coefficients.json"
        )
    return argparse.Namespace(**vars(given) | {"trace": given.from_run, "coefficients": given.from_run})


def _layer_spec(config: Config) -> str:
    """Return the layers that are forecast: torch's, unless Transformer Engine's are asked for by name."""
    return "transformer_engine" if config.model.layer_spec == "transformer_engine" else "torch"


def read_shape(config: Config, degrees, value_head: bool = False):
    """Return the ModelShape of ``model.hf_path``'s config.json, or with a value head; no weights are read."""
    from megatron_rl.backend.megatron_ddp import REFUSED_DDP_FIELDS
    from megatron_rl.backend.trainable_model import DistributedDataParallelConfig
    from megatron_rl.model.hf_config import model_shape
    from megatron_rl.model.megatron_fields import resolve_fields
    from megatron_rl.model.transformer_fields import transformer_fields
    from megatron_rl.validate import check_lengths
    from megatron_rl.weights.config_json import read_hf_config

    hf_config = read_hf_config(config.model.hf_path, provider=config.model.provider)
    value_head = value_head or config.trains_reward_model
    shape = model_shape(hf_config, config, degrees, layer_spec=_layer_spec(config), value_head=value_head)
    if config.generates:
        check_lengths(config, shape.context_tokens)
    transformer_fields(config)
    resolve_fields(config.megatron.ddp, DistributedDataParallelConfig, "megatron.ddp", REFUSED_DDP_FIELDS)
    return shape


def _largest_job(jobs, forecasts):
    """Return the job whose largest stage needs the most memory."""
    return max(zip(jobs, forecasts, strict=True), key=lambda pair: max(stage.total for stage in pair[1].memory))[0]


def _workloads(
    config: Config,
    given: argparse.Namespace,
    shape: ModelShape,
    prompt_lengths: Sequence[int] | None,
    responses: Sequence[Workload],
) -> tuple[Sequence[Workload], str]:
    from megatron_rl.simulator.workload import draw, read_trace

    drawn = {"--lengths": given.lengths, "--pass-rate": given.pass_rate, "--prompt-tokens": given.prompt_tokens}
    chosen = [option for option, value in drawn.items() if value]
    if config.train.num_rollouts == 0 and responses and given.trace is None and not chosen:
        some = _evenly(responses)
        rows = "pairs" if config.preference.is_on else "rows"
        return some, f"{len(some)} of {len(responses)} steps of {config.sft.samples_per_step} {rows} of data.train"
    if given.trace is None:
        workload, source = draw(
            config,
            lengths=given.lengths,
            pass_rate=given.pass_rate,
            prompt_tokens=given.prompt_tokens or prompt_lengths,
            seed=config.run.seed,
            context_tokens=shape.context_tokens,
        )
        return [workload], source
    if chosen:
        raise ConfigError(
            f"--trace {given.trace} and {' and '.join(chosen)} both say what the samples are; give one of them"
        )
    recorded = read_trace(given.trace)
    workloads = _evenly(recorded)
    count = config.train.prompts_per_rollout * config.rollout.samples_per_prompt
    some = f"{len(workloads)} of " if len(workloads) < len(recorded) else ""
    source = (
        f"recorded: {some}{len(recorded)} rollout(s) of {len(workloads[0].rewards)} samples, from "
        f"{pathlib.Path(given.trace).name}"
    )
    return workloads, source + (f" (the configuration asks for {count})" if count != len(workloads[0].rewards) else "")


def _evenly(recorded: Sequence[Workload]) -> list[Workload]:
    chosen = np.unique(np.linspace(0, len(recorded) - 1, min(len(recorded), MAX_ROLLOUTS)).round().astype(int))
    return [recorded[i] for i in chosen]


def _longest(steps: Sequence[Workload]) -> list[Workload]:
    """Return the supervised step with the longest response; [] of none."""
    return sorted(steps, key=lambda step: step.lengths.max())[-1:]


def _costs(config: Config, given: argparse.Namespace, shape, degrees, loss_share: float):
    from megatron_rl.simulator.machine import assumed_flops, load_coefficients, machine_costs, stated_machine

    if given.coefficients:
        return load_coefficients(given.coefficients, shape, config, degrees, loss_share=loss_share)
    flops, source = (given.flops, f"stated: {given.flops:.3g} FLOP/s per GPU") if given.flops else assumed_flops(shape)
    machine = stated_machine(flops, shape, config, degrees)
    source += " in the prior's proportions; not measured"
    return machine_costs(machine, shape, config, degrees, loss_share=loss_share, source=source)
