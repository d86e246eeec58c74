"""Records short runs in full precision, one of each feature, and compares two records to the bit.

    python -m tests.golden record runs/golden.json             # about eight minutes on two cores
    python -m tests.golden record runs/golden.json --only PPO  # runs whose name holds one of these texts
    python -m tests.golden compare before.json after.json

It is for a change that is not about numbers. Bits belong to one host, one torch and one Megatron-Core: record both on
the same machine. The runs on vLLM are recorded where vLLM is installed (.venv-vllm), and named as left out elsewhere.
"""

import argparse
import hashlib
import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from safetensors.torch import load_file

from tests.runs.command import write_teacher
from tests.workers.environment import TORCHRUN, worker_environment
from tests.workers.inputs import ROOT, prepare_inputs, prepare_mixture

BOUND_S = 1200  # a run that hangs ends here
COMMON = (
    *("run.deadline_s=120", "parallel.pipeline=1", "sft.steps=2", "train.num_rollouts=4"),
    *("train.prompts_per_rollout=8", "train.samples_per_mini_batch=16", "rollout.samples_per_prompt=4"),
    *("train.epochs_per_rollout=2", "train.export_last=true", "optimizer.schedule=constant"),
    *("reward.functions=[tests.reward_functions:parity]", "metrics.progress=false"),
)
RUNS: dict[str, tuple[str, ...]] = {
    "GRPO, PP2, skip": ("parallel.pipeline=2", "skip.mode=exact"),
    "PPO with a critic, DP2": (
        *("advantage.estimator=gae", "advantage.lam=0.95", "critic.lr=1e-3", "critic.warmup_rollouts=1"),
        *("rollout.samples_per_prompt=2", "reward.functions=[tests.reward_functions:graded]"),
        *("loss.kl_coefficient=0.1", "reference.kl_in=reward", "loss.kl_estimator=k3"),
    ),
    "LoRA, TP2, KL in the loss": (
        *("parallel.tensor=2", "lora.rank=4", "lora.alpha=16", "optimizer.lr=5e-3"),
        *("loss.kl_coefficient=0.01", "skip.mode=approximate"),
    ),
    "prefetch, replay, DP2": (
        *("rollout.producer.mode=prefetch", "rollout.producer.prefetch_rollouts=1", "rollout.producer.min_groups=3"),
        *("correction.mode=token_truncate", "replay.capacity_groups=16", "reroll.max_groups=2"),
        "train.num_rollouts=6",
    ),
    "Qwen3-MoE, EP2": ("parallel.expert=2",),
    "streaming, longest first": (
        *("rollout.producer.mode=streaming", "rollout.producer.min_groups=2", "correction.mode=token_truncate"),
        "rollout.start_order=longest_first",
    ),
    "dynamic sampling, two epochs of data, PP2": (
        *("parallel.pipeline=2", "rollout.dynamic_sampling.max_rounds=2", "skip.mode=exact", "plan.repack=false"),
        "reward.functions=[tests.reward_functions:mostly_dead]",
    ),
    "distillation": (
        *("advantage.estimator=distillation", "loss.policy=importance_sampling", "reward.functions=[]"),
        *("teacher.hf_path={inputs}/teacher", "rollout.samples_per_prompt=2", "metrics.log_completions=0"),
    ),
    "Qwen3-MoE, experts of the log-prob pass, EP2": ("parallel.expert=2", "rollout.routing_replay=old_logprobs"),
    "Qwen3-MoE, experts of the engine": ("rollout.routing_replay=rollout",),
    "an environment of several turns": (
        *("environment.name=tests.golden_players:Riddle", "environment.max_turns=3", "rollout.max_response_tokens=24"),
        "reward.functions=[environment,tests.reward_functions:parity]",
    ),
    "an agent behind the endpoint": (
        *("rollout.endpoint.agent=tests.golden_players:counts_on", "rollout.endpoint.deadline_s=100"),
        *("rollout.endpoint.num_agents=1", "rollout.max_response_tokens=24", "reward.functions=[environment]"),
    ),
    "log-probs equal to the bit": ("rollout.bitwise=true", "train.epochs_per_rollout=1"),
    "a critic on a rank of its own": (
        *("advantage.estimator=gae", "critic.lr=1e-3", "critic.placement=separate", "critic.ranks=1"),
        *("critic.hf_path={inputs}/model", "rollout.samples_per_prompt=2"),
        "reward.functions=[tests.reward_functions:graded]",
    ),
    "an adaptive KL and masked tokens": (
        *("loss.kl_coefficient=0.05", "skip.mode=approximate", "reference.controller=adaptive"),
        *("reference.kl_target=1e-4", "reference.kl_horizon=200", "reference.refresh_every_rollouts=2"),
        *("skip.logprob_passes=false", "correction.mode=token_mask", "correction.cap=1.5"),
    ),
}
BY_VLLM = (
    *("rollout.engine=vllm", "rollout.num_engines=1", "rollout.max_requests=1", "rollout.vllm={{max_num_seqs: 64}}"),
    *("rollout.start_s=100", "rollout.request_s=60", "weight_sync.deadline_s=60"),
)
VLLM_RUNS: dict[str, tuple[str, ...]] = {
    "vLLM, whole weights": BY_VLLM,
    "vLLM, what changed alone": (*BY_VLLM, "weight_sync.delta=true", "weight_sync.bucket_mb=0.05"),
    "vLLM, adapters alone": (
        *(*BY_VLLM, "weight_sync.adapters=alone"),
        *("lora.rank=4", "lora.alpha=16", "optimizer.lr=5e-3"),
    ),
}
KEPT = (
    *("train/loss", "train/grad_norm", "train/entropy", "reward/mean"),
    *("critic/loss", "critic/grad_norm", "skip/samples_dropped"),
)


def record_run(name: str, settings: Sequence[str], folder: pathlib.Path, inputs: pathlib.Path) -> dict:
    """Train one run on two processes; return its rows, floats as hexadecimal text, and its last weights' checksum."""
    config = ROOT / "examples" / "quickstart" / "quickstart.yaml"
    command = [sys.executable, "-m", *TORCHRUN, "2", "-m", "megatron_rl.train", "--config", str(config)]
    command += ["--run-dir", str(folder), f"model.hf_path={inputs / 'model'}", f"data.train={inputs / 'train.jsonl'}"]
    given = dict(cwd=ROOT, env=worker_environment(), capture_output=True, text=True, timeout=BOUND_S, check=False)
    done = subprocess.run([*command, *(each.format(inputs=inputs) for each in (*COMMON, *settings))], **given)
    if done.returncode:
        raise SystemExit(f"{name}: exit code {done.returncode}\n{done.stderr[-4000:]}")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [
        {key: float(row[key]).hex() for key in KEPT if key in row}
        | {"kind": "REAL" if row["step_kind"] == "REAL" else "GHOST"}
        for row in rows
    ]
    return {"steps": steps, "weights": weights_checksum(folder)}


def weights_checksum(folder: pathlib.Path) -> str:
    """Return the SHA-256 over names and bytes of the last exported policy's tensors, in the order of their names."""
    exports = (folder / "checkpoints").glob("step_*/hf*")
    last = max(exports, key=lambda path: (int(path.parent.name.removeprefix("step_")), path.name))
    digest = hashlib.sha256()
    for path in sorted(last.glob("*.safetensors")):
        for name, tensor in sorted(load_file(path).items()):
            digest.update(name.encode() + tensor.contiguous().view(-1).numpy().tobytes())
    return digest.hexdigest()


def record(out: pathlib.Path, only: Sequence[str]) -> None:
    """Run each, or those whose name holds a text of ``only``, and write their record as JSON."""
    found, runs = {}, RUNS
    if importlib.util.find_spec("vllm") is not None:
        runs = RUNS | VLLM_RUNS
    else:
        print(f"vLLM is not installed here: {len(VLLM_RUNS)} runs are left out", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        root = pathlib.Path(scratch)
        plain = prepare_inputs(root / "arithmetic", hidden=64, layers=2, heads=2, intermediate=96)
        mixture = prepare_mixture(plain, root / "mixture")
        write_teacher(plain / "model", plain / "teacher")
        for number, (name, settings) in enumerate(runs.items()):
            if only and not any(text in name for text in only):
                continue
            found[name] = record_run(name, settings, root / f"run{number}", mixture if "MoE" in name else plain)
            print_row(name, found[name])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n")


def print_row(name: str, run: dict) -> None:
    """Print a run's last step and checksum, and how many steps of each kind it took."""
    kinds = [step["kind"] for step in run["steps"]]
    last = {key: float.fromhex(value) for key, value in run["steps"][-1].items() if key != "kind"}
    ghosts, weights = kinds.count("GHOST"), run["weights"][:16]
    print(f"{name}: {len(kinds)} steps, {ghosts} ghosts, last {last}, weights {weights}", flush=True)


def compare(before: pathlib.Path, after: pathlib.Path) -> int:
    """Print where two records differ; return 0 where they are equal in every bit, else 1."""
    one, two = json.loads(before.read_text()), json.loads(after.read_text())
    differing = [name for name in one | two if one.get(name) != two.get(name)]
    for name in differing:
        steps = zip(one.get(name, {}).get("steps", ()), two.get(name, {}).get("steps", ()), strict=False)
        first = next((number for number, (x, y) in enumerate(steps, start=1) if x != y), None)
        where = f"first in step {first}" if first else "in its weights, its number of steps or its being there"
        print(f"{name}: differs, {where}")
    if not differing:
        print(f"{len(one)} runs, equal in every bit")
    return int(bool(differing))


def main() -> int:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__, formatter_class=shape)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("out", type=pathlib.Path)
    recording.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="of a run's name")
    comparison = commands.add_parser("compare")
    comparison.add_argument("before", type=pathlib.Path)
    comparison.add_argument("after", type=pathlib.Path)
    given = parser.parse_args()
    if given.command == "compare":
        return compare(given.before, given.after)
    record(given.out, given.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
