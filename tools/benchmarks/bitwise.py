"""Measures what rollout.bitwise costs on this host: short runs without it and with it, in turn.

    python tools/benchmarks/bitwise.py --hidden 256 --layers 4

Three kinds of run over the same prompts, one process and one thread each: `ordinary`, with the default settings;
`passes`, ordinary layers with a log-prob pass of every sample, which bitwise needs; and `bitwise`. Every sample is
trained (skip.mode=off). Printed are the medians of each rollout's seconds after the first, and their ratio to
`passes`. The runs' own log-prob gaps are printed too.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import tempfile

from short_run import prepare, short_run

STAGES = ("rollout", "logprob", "update")
KINDS = {
    "ordinary": (),
    "passes": ("correction.old_logprobs=recompute", "skip.logprob_passes=false"),
    "bitwise": ("rollout.bitwise=true",),
}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python tools/benchmarks/bitwise.py --hidden 256 --layers 4 --response-tokens 64",
    )
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--prompts", type=int, default=8, help="of a rollout")
    parser.add_argument("--samples", type=int, default=4, help="per prompt")
    parser.add_argument("--response-tokens", type=int, default=64)
    parser.add_argument("--rollouts", type=int, default=4, help="of a run, its first one apart")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each kind")
    parser.add_argument("--json", type=pathlib.Path, help="also write what is printed there")
    given = parser.parse_args(arguments)
    for name in ("hidden", "layers", "prompts", "samples", "response_tokens", "rollouts", "rounds"):
        if vars(given)[name] < 1:
            parser.error(f"--{name.replace('_', '-')} {vars(given)[name]} must be at least 1")
    return given


def run(given: argparse.Namespace, inputs: pathlib.Path, run_dir: pathlib.Path, kind: str) -> list[dict]:
    """Return the rows of one run; every rollout is one optimizer step."""
    rows, _ = short_run(
        inputs,
        run_dir,
        f"train.num_rollouts={given.rollouts + 1}",
        f"train.prompts_per_rollout={given.prompts}",
        f"rollout.samples_per_prompt={given.samples}",
        f"train.samples_per_mini_batch={given.prompts * given.samples}",
        f"rollout.max_response_tokens={given.response_tokens}",
        f"model.dtype={given.dtype}",
        "skip.mode=off",
        "optimizer.schedule=constant",
        "checkpoint.save_every_rollouts=0",
        *KINDS[kind],
    )
    return rows


def measure(given: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return, for each kind of run, the median seconds of every stage, of their sum, and the largest gap."""
    found: dict[str, list[dict]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        inputs = folder / "inputs"
        prepare(inputs, hidden=given.hidden, layers=given.layers, max_position=given.response_tokens + 64)
        for turn in range(given.rounds):
            for kind in KINDS:
                found[kind] += run(given, inputs, folder / f"{kind}_{turn}", kind)[1:]
    table = {}
    for kind, rows in found.items():
        seconds = {stage: [row.get(f"time/{stage}_s", 0.0) for row in rows] for stage in STAGES}
        table[kind] = {f"{stage}_s": statistics.median(values) for stage, values in seconds.items()}
        table[kind]["all_s"] = statistics.median([sum(parts) for parts in zip(*seconds.values(), strict=True)])
        table[kind]["logprob_gap_max"] = max(row["train/logprob_gap_max"] for row in rows)
    return table


def main(arguments: list[str] | None = None) -> None:
    given = parse(arguments)
    table = measure(given)
    print(f"{'':10}" + "".join(f"{column:>18}" for column in table["passes"]))
    for kind, row in table.items():
        print(f"{kind:10}" + "".join(f"{value:18.4g}" for value in row.values()))
    timed = [column for column in table["passes"] if column.endswith("_s")]
    ratios = [table["bitwise"][column] / max(table["passes"][column], 1e-9) for column in timed]
    print(f"{'ratio':10}" + "".join(f"{ratio:18.2f}" for ratio in ratios))
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
