"""The figures of a forecast, for JSON and for the printed tables."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_rl.simulator.engine_memory import GIB, GpuNeeds, gib, shortfalls
from megatron_rl.simulator.forecast import Forecast, Job, Outcome
from megatron_rl.simulator.model_files import words


def short(value: float) -> str:
    """Return a number as short text: ``1.2M``, ``340``, ``0.05``, ``3e-05``."""
    for size, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{suffix}"
    return f"{value:.4g}"


def _outcome(outcome: Outcome) -> dict[str, Any]:
    kinds = ("num_fillers", "silent_ranks", "ghosts")
    return {
        "update_s": outcome.update_s,
        "pipeline_s": outcome.pipeline_s,
        "optimizer_s": outcome.optimizer_s,
        "bubble_share": outcome.bubble_share.tolist(),
        "data_parallel_imbalance": outcome.imbalance,
        "microbatches_per_replica": list(outcome.microbatches),
        "largest_microbatch_tokens": outcome.largest_tokens,
        "tokens": outcome.tokens,
        "optimizer_steps": len(outcome.plan.mini_batches),
        **{name: outcome.count(name) for name in kinds},
    }


def figures(
    forecast: Forecast,
    job: Job,
    needs: GpuNeeds,
    *,
    title: str,
    workload: str,
    num_rollouts: int,
    gpu_bytes: float,
) -> dict[str, Any]:
    """Return {name: JSON-able value}: all figures of a forecast, in seconds, tokens and bytes.

    needs: the bytes that the job needs on a GPU.
    title: the heading of the printed table.
    workload: the origin of the samples, in words.
    num_rollouts: the number of rollouts that were forecast; ``forecast`` is the one of median time.
    gpu_bytes: the memory of a GPU.
    """
    config, degrees = job.config, job.degrees
    return {
        "title": title,
        "update_of": "a supervised step" if config.train.num_rollouts == 0 else "one rollout",
        "generates": config.generates,
        "world_size": degrees.world_size,
        "degrees": degrees.named,
        "workload": workload,
        "rollouts": num_rollouts,
        "costs": forecast.costs.source,
        "dead_samples": forecast.dead_samples,
        "dense": _outcome(forecast.dense),
        "skip": _outcome(forecast.skip),
        "gain_ideal": forecast.ideal,
        "gain_predicted": forecast.gain,
        "recompute": "full" if job.placed.full_recompute else "none",
        "distributed_optimizer": config.optimizer.distributed,
        "memory": [dataclasses.asdict(stage) | {"total": stage.total} for stage in forecast.memory],
        "gpu_bytes": gpu_bytes,
        "needs": dataclasses.asdict(needs),
        "shortfalls": shortfalls(needs, config.rollout, gpu_bytes),
        "constraints": [dataclasses.asdict(x) for x in forecast.constraints],
    }


ROWS = (
    ("update", "update_s", "s"),
    ("  pipeline", "pipeline_s", "s"),
    ("  optimizer", "optimizer_s", "s"),
    ("tokens", "tokens", ""),
    ("bubble, mean of stages", "bubble_share", "%"),
    ("data-parallel imbalance", "data_parallel_imbalance", "%"),
    ("micro-batches per replica", "microbatches_per_replica", "range"),
    ("largest micro-batch", "largest_microbatch_tokens", "tokens"),
    ("optimizer steps", "optimizer_steps", ""),
    ("ghost steps", "ghosts", ""),
    ("silent replicas", "silent_ranks", ""),
    ("filler micro-batches", "num_fillers", ""),
)


def _cell(value: Any, unit: str) -> str:
    if unit == "%":
        return f"{100 * (sum(value) / len(value) if isinstance(value, list) else value):.1f} %"
    if unit == "range":
        return str(value[0]) if value[0] == value[1] else f"{value[0]} to {value[1]}"
    return f"{short(value)} {unit}".rstrip() if isinstance(value, float) else f"{value:,} {unit}".rstrip()


NEARLY = 0.9  # share of a GPU's memory; what is not counted may take the rest


def binding(content: dict[str, Any]) -> str:
    """Return a sentence on the limit whose removal would shorten the update the most.

    content: the result of ``figures``. The sentence is about the update ``content["skip"]``, in which
        samples without signal are dropped.
    """
    first = content["constraints"][0]
    share = first["saves_s"] / content["skip"]["update_s"] if content["skip"]["update_s"] else 0.0
    return f"{first['name']}: {100 * share:.1f} % of the skip run's update ({first['note']})"


def gpu_words(content: dict[str, Any]) -> str:
    """Return a sentence on the bytes that a GPU needs while training and while generating, with the engine's share.

    content: the result of ``figures``.
    """
    needs, whole = content["needs"], content["gpu_bytes"]
    parts = []
    for time in ("training", "generating") if content["generates"] else ("training",):
        most, stage = needs[time]
        engine = needs["engine"][f"while_{time}"]
        share = f", {gib(engine)} of them the engine's" if engine else ""
        parts.append(f"{time} {gib(most)} of {whole / GIB:g} GiB (stage {stage}{share})")
    if needs["critic"]:
        most, stage = needs["critic"]
        parts.append(f"the critic, on ranks of its own, {gib(most)} of {whole / GIB:g} GiB (its stage {stage})")
    largest = max(needs[time][0] for time in ("training", "generating", "critic") if needs[time])
    near = "; NOT COUNTED are allocator fragments, communication buffers and CUDA itself, for which little is left"
    return "; ".join(parts) + (near if NEARLY * whole < largest <= whole else "")


def show(content: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=124)
    ideal = "-" if content["gain_ideal"] is None else f"{content['gain_ideal']:.2f}"
    plans = Table(
        title=content["title"],
        caption=f"gain of the skip: predicted {content['gain_predicted']:.2f}, ideal {ideal} by tokens",
    )
    plans.add_column(f"{content['update_of']}'s update")
    for name in ("dense", "skip"):
        plans.add_column(name, justify="right")
    for label, key, unit in ROWS:
        plans.add_row(label, *(_cell(content[kind][key], unit) for kind in ("dense", "skip")))
    console.print(plans)
    memory = Table(title=f"GiB on a GPU of each stage (recompute {content['recompute']}); right: were it otherwise")
    rarer = ("reference", "critic_weights", "critic_state", "critic_working")
    rarer = tuple(name for name in rarer if any(stage[name] for stage in content["memory"]))
    names = ("weights", "gradients", "optimizer", "activations", "logits", *rarer, "total")
    other = {"optimizer_whole": "unsharded", "activations_kept": "all kept", "activations_recomputed": "recomputed"}
    for name in ("stage", "layers", *names, *other.values()):
        memory.add_column(name.replace("_", " "), justify="right")
    for stage in content["memory"]:
        counts, sizes = (stage["stage"], stage["layers"]), (stage[name] / GIB for name in (*names, *other))
        memory.add_row(*map(str, counts), *(f"{size:.2f}" for size in sizes))
    console.print(memory)
    limits = Table(title="what binds the skip run's update")
    for name in ("constraint", "would save", "share", "what it is"):
        limits.add_column(name, justify="right" if name in ("would save", "share") else "left")
    whole = content["skip"]["update_s"] or 1.0
    for constraint in content["constraints"]:
        limits.add_row(
            constraint["name"],
            f"{short(constraint['saves_s'])} s",
            f"{100 * constraint['saves_s'] / whole:.1f} %",
            constraint["note"],
        )
    console.print(limits)
    console.print(f"binds: {binding(content)}", highlight=False)
    console.print(f"GPU: {gpu_words(content)}", highlight=False)
    console.print(
        f"samples: {content['workload']}; {100 * content['dead_samples']:.0f} % without signal", highlight=False
    )
    console.print(f"times: {content['costs']}", highlight=False)
    for line in words(content["model_files"]):
        console.print(line, highlight=False)
