"""Serves a small model by Tinker's API and trains it by two recipes of tinker-cookbook, as they are published.

``sl_loop`` teaches the form of an answer, ``math_rl`` then the sums by rewards, from the first one's checkpoint. The
model is tiny and its data are sums, under the names that the recipes ask for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from workplace import CHAT, make_workplace

from megatron_rl.observability.metrics import read_metrics
from megatron_rl.observability.progress_bar import ProgressBar
from megatron_rl.observability.report import write_report
from megatron_rl.observability.summary import WARMUP

ROOT = pathlib.Path(__file__).resolve().parents[2]
START_S, END_S, STALL_S = 300.0, 30.0, 600.0
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "TINKER_TELEMETRY": "0", "TINKER_API_KEY": "tml-demo"}
REWARD = "env/all/reward/total"


@contextlib.contextmanager
def served(out: pathlib.Path, overrides: Sequence[str]) -> Iterator[str]:
    """Serve within the block; yield the address."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc_per_node", "2"]
    command += ["-m", "megatron_rl.serve", "--config", str(ROOT / "examples" / "tinker" / "server.yaml")]
    command += ["--run-dir", str(out / "server"), f"model.hf_path={out / 'inputs' / CHAT}", "serve.port=0", *overrides]
    log = out / "server.log"
    with log.open("w") as said:
        server = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        ends_at = time.monotonic() + START_S
        while not (found := re.findall(r"serving .* at (http://[\d.:]+)", log.read_text())):
            if server.poll() is not None or time.monotonic() > ends_at:
                raise SystemExit(f"the server did not start:\n{log.read_text()}")
            time.sleep(0.2)
        yield found[0]
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(END_S)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)


def run_recipe(
    recipe: str, phase: str, out: pathlib.Path, first_step: int, bar: ProgressBar, *arguments: str
) -> list[dict]:
    """Run a recipe, showing each of its steps; return their rows: the server's, with the recipe's reward."""
    log, before = out / recipe.split(".")[0], _models(out)
    command = [sys.executable, "-m", f"tinker_cookbook.recipes.{recipe}", f"model_name={CHAT}", f"log_path={log}"]
    with (out / f"{log.name}.log").open("w") as said:
        environment = {**os.environ, **ENVIRONMENT, "HF_DATASETS_CACHE": str(out / "datasets")}  # not an earlier demo's
        child = subprocess.Popen([*command, *arguments], cwd=out / "inputs", env=environment, stdout=said, stderr=said)
    rows: list[dict] = []
    heard = time.monotonic()
    try:
        while True:
            ended = child.poll() is not None  # read once more after the end
            served_rows = [row for path in _models(out) - before for row in _lines(path)]
            own = _lines(log / "metrics.jsonl")
            for number in range(len(rows), min(len(served_rows), len(own))):
                row = {**served_rows[number], "step": first_step + number, "phase": phase}
                if REWARD in own[number]:
                    row["reward/mean"] = own[number][REWARD]
                rows.append(row)
                bar.update(row)
                heard = time.monotonic()
            if ended:
                break
            if time.monotonic() - heard > STALL_S:
                raise SystemExit(f"{recipe} made no step for {STALL_S:g} s; see {said.name}")
            time.sleep(0.2)
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait(END_S)
    if child.returncode != 0:
        raise SystemExit(f"{recipe} ended with {child.returncode}; see {said.name}")
    return rows


def _lines(path: pathlib.Path) -> list[dict]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _models(out: pathlib.Path) -> set[pathlib.Path]:
    return set((out / "server" / "models").glob("*/metrics.jsonl"))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of everything that is made")
    parser.add_argument("--supervised-steps", type=int, default=100)
    parser.add_argument("--rl-steps", type=int, default=24)
    options, overrides = parser.parse_known_args(arguments)
    out = options.out.resolve()
    if (out / "server").exists():
        raise SystemExit(f"{out} holds an earlier demo; name another folder by RUN_DIR, or remove it")
    make_workplace(out / "inputs", hidden=128, boxed=True)
    total = options.supervised_steps + options.rl_steps
    with served(out, overrides) as address, ProgressBar(total, enabled=True) as bar:
        bar.note(f"serving {CHAT} at {address}; its output: {out / 'server.log'}")
        url = f"base_url={address}"
        sl = ["batch_size=32", "max_length=600", "learning_rate=4e-3", "train_on_what=last_assistant_message"]
        sl += ["save_every=0", f"max_steps={options.supervised_steps}", url]
        rows = run_recipe("sl_loop", WARMUP, out, 1, bar, *sl)
        start = json.loads((out / "sl_loop" / "checkpoints.jsonl").read_text().splitlines()[-1])["state_path"]
        rl = ["env=gsm8k", "renderer_name=qwen3", "group_size=8", "groups_per_batch=16", "max_tokens=40"]
        rl += ["learning_rate=5e-4", "eval_every=0", "save_every=0", f"max_steps={options.rl_steps}", url]
        rl += [f"load_checkpoint_path={start}"]
        rows += run_recipe("math_rl.train", "rl", out, len(rows) + 1, bar, *rl)
        metrics = out / "metrics.jsonl"
        metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
        write_report(metrics, (out / "server" / "config.yaml").read_text(), out / "report.html")
        bar.finish(read_metrics(metrics), out / "report.html")


if __name__ == "__main__":
    main()
