"""Times one GRPO update by TRL and by megatron_rl (dense and skip) on the same model and samples, if gradients agree.

    python tools/benchmarks/update.py --dead-share 0 0.75 --json runs/benchmark_update.json

float32 on the CPU, one process, the same host and threads. First the gradient of every setting of either side is
compared, by Hugging Face name, for every share; if the relative error over all weights is not below the bar, the tool
names both, ends with status 1 and measures nothing. Then every setting takes whole optimizer steps in turn, and the
medians count. Tokens/s is the batch's tokens, dropped samples included and pads not, over the seconds of the step: the
dense run's work done. TRL's best is given twice: as it ships (the whole batch padded to its longest prompt and its
longest response), and of all settings, with each micro-batch cut to its own longest and the samples sorted by length,
which TRL does not do. --trl-compile adds torch.compile to both.

Neither side's rollout is timed. TRL's padding is not timed, as it belongs to its rollout; megatron_rl's planning and
packing are. Its packing has a thread of its own beside --threads: the CPU seconds, of the whole process, count that
too, and say more on a busy host.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import platform as host_platform
import sys
from collections.abc import Mapping, Sequence

from skip import make_advantages, make_batch
from update_compare import BAR, FAMILIES, Contender, GradientsDiffer, best_of, compare_gradients, time_contenders

LEARNING_RATE = 1e-6
FAULTS = ("weight", "advantage", "denominator")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python tools/benchmarks/update.py --dead-share 0 0.75 --repeats 5 "
        "--json runs/benchmark_update.json",
    )
    parser.add_argument(
        "--dead-share", type=float, nargs="+", default=[0.0, 0.75], help="shares of groups without signal, 0 to below 1"
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="steps of every setting, taken in turn, after one to warm up"
    )
    parser.add_argument("--groups", type=int, default=40, help="prompt groups in the batch")
    parser.add_argument("--group-size", type=int, default=4, help="samples per group")
    parser.add_argument(
        "--mean-tokens", type=int, default=64, help="median length of a sample; lengths are log-normal around it"
    )
    parser.add_argument(
        "--trl-samples", type=int, nargs="+", default=[2, 4, 8, 16], help="TRL's per_device_train_batch_size, 3 or more"
    )
    parser.add_argument(
        "--trl-compile", action="store_true", help="TRL under torch.compile as well; needs a C++ compiler"
    )
    parser.add_argument(
        "--max-tokens-per-microbatch", type=int, nargs="+", default=[1024, 2048, 4096], help="megatron_rl's settings"
    )
    parser.add_argument("--threads", type=int, default=1, help="torch's CPU threads, of both")
    parser.add_argument("--hf-path", help="a Hugging Face directory's model is trained; default: a small random Qwen2")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=pathlib.Path, help="also write what is printed there")
    parser.add_argument(
        "--fault", choices=FAULTS, help="plant an error on megatron_rl's side, to see the comparison fail"
    )
    given = parser.parse_args(arguments)
    given.trl_samples, given.max_tokens_per_microbatch = (
        sorted(set(given.trl_samples)),
        sorted(set(given.max_tokens_per_microbatch)),
    )
    refuse(parser, given)
    return given


def refuse(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """End with status 2 on settings that cannot be measured, naming the value and a valid one."""
    for name in ("repeats", "groups", "mean_tokens", "threads", "layers", "vocab"):
        if getattr(given, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(given, name)} must be at least 1")
    if given.hidden < 64 or given.hidden % 64:
        parser.error(f"--hidden {given.hidden} must be a multiple of 64, the width of a head")
    if given.group_size < 2:
        parser.error(f"--group-size {given.group_size} must be at least 2: TRL refuses groups of one")
    if len(given.trl_samples) < 3:
        parser.error(
            f"--trl-samples {given.trl_samples} has {len(given.trl_samples)} sizes; TRL's best is taken of at least "
            "three"
        )
    samples = given.groups * given.group_size
    for size in given.trl_samples:
        if size < 1 or samples % size:
            parser.error(
                f"--trl-samples {size} must divide the batch's {samples} samples (--groups x --group-size), as TRL's "
                "batches do"
            )
    if given.max_tokens_per_microbatch[0] < 8:
        parser.error(
            f"--max-tokens-per-microbatch {given.max_tokens_per_microbatch[0]} must be at least 8, the shortest sample"
        )
    for share in given.dead_share:
        if not 0 <= share < 1 or round(share * given.groups) >= given.groups:
            parser.error(
                f"--dead-share {share} leaves no signal in {given.groups} groups: no gradient to compare; use less, "
                "or more groups"
            )


# ---- the two sides --------------------------------------------------------------------------------------------------


def build_model(given: argparse.Namespace):
    """Build the Hugging Face model from whose weights both sides start."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    if given.hf_path:
        return AutoModelForCausalLM.from_pretrained(given.hf_path, dtype=torch.float32)
    config = Qwen2Config(
        vocab_size=given.vocab,
        hidden_size=given.hidden,
        num_hidden_layers=given.layers,
        num_attention_heads=given.hidden // 64,
        num_key_value_heads=given.hidden // 64,
        intermediate_size=given.hidden * 3,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(given.seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def build_backend(model, given: argparse.Namespace):
    """Build MegatronBackend over copies of the model's weights; --fault weight doubles one weight of its first norm."""
    import copy

    from megatron_rl.backend import MegatronBackend
    from megatron_rl.config import load_config
    from megatron_rl.weights.fused import file_tensors

    weights = {
        name: x.detach().clone() for name, x in file_tensors(model.state_dict(), model.config.model_type).items()
    }
    if given.fault == "weight":
        weights["model.layers.0.input_layernorm.weight"][0] *= 2
    overrides = [
        "model.dtype=float32",
        "model.init=random",
        f"optimizer.lr={LEARNING_RATE}",
        f"run.seed={given.seed}",
        f"plan.max_tokens_per_microbatch={given.max_tokens_per_microbatch[0]}",
    ]
    return MegatronBackend(
        load_config(None, overrides), hf_config=copy.deepcopy(model.config), weights=weights, total_steps=10_000
    )


class OurUpdate:
    """Runs megatron_rl's update of one batch: planned, packed, accumulated, stepped."""

    def __init__(self, backend, batch, values, *, fault: str | None):
        import numpy as np

        from megatron_rl.algorithm.advantage import reduction_weights
        from megatron_rl.algorithm.signal import has_signal
        from megatron_rl.types import LossInputs

        self.backend, self.batch, self.rules = backend, batch, backend.rules
        self.signal = has_signal(values, batch.facts.loss_tokens)
        weights = reduction_weights(
            "token_mean", batch.facts, np.arange(batch.facts.num_samples), max_response_tokens=1
        )
        folded = values * weights
        if fault == "advantage":
            folded[np.flatnonzero(folded)[0]] *= 1.1
        if fault == "denominator":
            folded = folded * (1 + 1 / batch.facts.loss_tokens.sum())
        self.inputs = LossInputs(advantages=folded, weights=weights)

    def plan(self, cap: int, drops: bool):
        self.backend.rules = dataclasses.replace(self.rules, max_tokens=cap)
        return self.backend.plan_training(self.batch, self.signal, drops=drops)

    def accumulate(self, cap: int, drops: bool):
        plan = self.plan(cap, drops)
        self.batch = self.backend.fetch_rows(self.batch, plan)
        (mini_batch,) = plan.mini_batches
        self.backend.forward_backward(self.batch, mini_batch, self.inputs, fingerprint=plan.fingerprints()[0])
        return mini_batch

    def gradient(self, cap: int, drops: bool) -> Mapping:
        self.backend.zero_grad()
        self.accumulate(cap, drops)
        gradient = self.backend.gradient()
        self.backend.zero_grad()
        return gradient

    def update(self, cap: int, drops: bool) -> None:
        mini_batch = self.accumulate(cap, drops)
        self.backend.optim_step(mini_batch.kind)  # ends with the gradients at zero
        self.backend.schedule.gather_parameters()

    def contenders(self, caps: Sequence[int]) -> list[Contender]:
        total = self.batch.facts.total_tokens
        contenders = []
        for family, drops in (("dense", False), ("skip", True)):
            for cap in caps:
                (mini_batch,) = self.plan(cap, drops).mini_batches
                contenders.append(
                    Contender(
                        family=family,
                        name=f"megatron_rl {family}, {cap} tokens",
                        tokens=int(total[mini_batch.order].sum()),
                        gradient=lambda cap=cap, drops=drops: self.gradient(cap, drops),
                        update=lambda cap=cap, drops=drops: self.update(cap, drops),
                    )
                )
        return contenders


def trl_contenders(side, samples: Sequence, values, given: argparse.Namespace) -> list[Contender]:
    from update_trl import make_microbatches, padded_tokens, trl_settings

    contenders = []
    for setting in trl_settings(given.trl_samples, compiled=given.trl_compile):
        parts = make_microbatches(samples, values, setting)
        contenders.append(
            Contender(
                family="trl_shipped" if setting.as_shipped else "trl_helped",
                name=setting.name,
                tokens=padded_tokens(parts),
                gradient=lambda parts=parts, setting=setting: side.gradient(parts, setting),
                update=lambda parts=parts, setting=setting: side.update(parts, setting),
            )
        )
    return contenders


# ---- measuring ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Holds one share of dead groups: every setting of both sides, ready to run on the same batch.

    checks: the comparisons of their gradients.
    """

    dead_share: float
    without_signal: int
    contenders: Sequence[Contender]
    checks: Sequence[dict]


def compare_share(backend, side, batch, share: float, given: argparse.Namespace) -> Share:
    """Compare all gradients at one share; raises GradientsDiffer.

    No optimizer may have stepped: the two sides' weights are equal only until then.
    """
    values = make_advantages(share, given)
    ours = OurUpdate(backend, batch, values, fault=given.fault)
    contenders = [*trl_contenders(side, batch.local, values, given), *ours.contenders(given.max_tokens_per_microbatch)]
    try:
        checks = compare_gradients(contenders, BAR)
    except GradientsDiffer as error:
        raise GradientsDiffer(f"at --dead-share {share}: {error}") from error
    return Share(dead_share=share, without_signal=int((~ours.signal).sum()), contenders=contenders, checks=checks)


def measure(share: Share, side, batch, given: argparse.Namespace) -> dict:
    """Return one share's times, and the number of samples that TRL ran in one step."""
    before = side.samples_forwarded
    share.contenders[0].update()
    forwarded = side.samples_forwarded - before
    tokens = int(batch.facts.total_tokens.sum())
    # Two rounds if torch.compile takes part: it was seen to compile once more in the second.
    rows = time_contenders(share.contenders, given.repeats, tokens, warm_up=2 if given.trl_compile else 1)
    return {
        "dead_share": share.dead_share,
        "dense_tokens": tokens,
        "samples": batch.facts.num_samples,
        "samples_without_signal": share.without_signal,
        "samples_forwarded_by_trl": forwarded,
        "gradient_error": max(x["error"] for x in share.checks),
        "gradients": share.checks,
        "best": best_of(rows),
        "settings": rows,
    }


# ---- printing -------------------------------------------------------------------------------------------------------


def summary_table(result: dict):
    from rich.table import Table

    caption = (
        f"gradients agree to {result['gradient_error']:.1e} (bar {BAR:.0e}); TRL's update ran "
        f"{result['samples_forwarded_by_trl']} of {result['samples']} samples, {result['samples_without_signal']} of "
        "them with zero advantage"
    )
    table = Table(title=f"one update, {100 * result['dead_share']:.0f} % of the groups without signal", caption=caption)
    for name in ("update", "tokens/s", "s", "CPU s", "x TRL as it ships", "x TRL's best", "by CPU s", "setting"):
        table.add_column(name, justify="left" if name in ("update", "setting") else "right")
    for family, row in result["best"].items():
        table.add_row(
            FAMILIES[family],
            f"{row['tokens_per_s']:,.0f}",
            f"{row['s']:.3f}",
            f"{row['cpu_s']:.3f}",
            f"{row['over_shipped']:.2f}",
            f"{row['over_helped']:.2f}",
            f"{row['cpu_over_helped']:.2f}",
            row["setting"],
        )
    return table


def settings_table(result: dict):
    from rich.table import Table

    table = Table(title=f"every setting; {result['dense_tokens']:,} tokens in {result['samples']} samples")
    for name in ("setting", "positions", "s", "CPU s", "tokens/s", "gradient error"):
        table.add_column(name, justify="left" if name == "setting" else "right")
    errors = {x["setting"]: x["error"] for x in result["gradients"]}
    for row in result["settings"]:
        table.add_row(
            row["setting"],
            f"{row['positions']:,}",
            f"{row['s']:.3f}",
            f"{row['cpu_s']:.3f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{errors[row['setting']]:.1e}",
        )
    return table


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    import torch
    from rich.console import Console
    from update_trl import TrlMissing, TrlUpdate, load_trl, versions

    try:
        load_trl()
    except TrlMissing as error:
        print(f"update.py: {error}", file=sys.stderr)
        return 2
    torch.set_num_threads(given.threads)
    model = build_model(given)
    # Before the backend: once torch.distributed is up, accelerate wraps the model in DistributedDataParallel, a cost
    # that TRL alone does not have.
    num_samples = given.groups * given.group_size
    side = TrlUpdate(model, num_samples=num_samples, group_size=given.group_size, lr=LEARNING_RATE, seed=given.seed)
    backend = build_backend(model, given)
    batch = make_batch(
        backend, argparse.Namespace(**{**vars(given), "max_tokens_per_microbatch": given.max_tokens_per_microbatch[0]})
    )
    torch.set_num_threads(given.threads)  # again, if a library has set it
    package_versions = versions()
    machine = (
        f"{host_platform.machine()} CPU, {os.cpu_count()} cores, --threads {torch.get_num_threads()}, "
        + ", ".join(f"{name} {version}" for name, version in package_versions.items())
    )
    try:
        shares = [compare_share(backend, side, batch, share, given) for share in given.dead_share]
        results = [measure(share, side, batch, given) for share in shares]
    except GradientsDiffer as error:
        print(f"update.py: {error}", file=sys.stderr)
        return 1
    finally:
        side.close()
        backend.close()
    console = Console(width=150)
    console.print(machine)
    for result in results:
        console.print(summary_table(result), settings_table(result))
    if given.json:
        settings = {key: str(value) if isinstance(value, pathlib.Path) else value for key, value in vars(given).items()}
        written = {
            "machine": machine,
            "versions": package_versions,
            "bar": BAR,
            "settings": settings,
            "results": results,
        }
        given.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
        print(f"written: {given.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
