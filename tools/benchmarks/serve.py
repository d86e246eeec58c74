"""Measures the server of Tinker's API on this host: tokens a second against the trainer's own, and waiting.

    .venv-tinker/bin/python tools/benchmarks/serve.py --json runs/benchmark_serve.json

`make .venv-tinker/.installed` makes such an environment. Server and trainer have two processes with PP=2 each, one
after the other, on one model and the same texts.

train:   `sl_loop` of tinker-cookbook through the server, and the supervised steps of megatron_rl.train; medians of
         tokens a second over a step, the first --warmup steps left out.
latency: milliseconds from the sending of a request to its answer, as a client without the SDK sees it: an optimizer
         step without a gradient, a sample of one token, a training request of one datum; medians of --requests.
skip:    the time of training requests in which a share of the data has no signal, under serve.logprobs=all and
         trained, against those in which all have; medians of --requests.
rl:      `math_rl` of tinker-cookbook from a model that sl_loop has taught its sums, so that most groups agree:
         seconds of a step's training under skip.mode=off, and with the skip under serve.logprobs=all and trained.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "tinker")]

from demo import ENVIRONMENT, served  # noqa: E402
from workplace import CHAT, make_workplace  # noqa: E402

PARTS = ("train", "latency", "skip", "rl")
SERVER = ("serve.port=0", "plan.max_tokens_per_microbatch=4096")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python tools/benchmarks/serve.py --hidden 256 --json runs/benchmark_serve.json",
    )
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32, help="texts of a step")
    parser.add_argument("--text-tokens", type=int, default=256, help="of each answer; the longest, half is the least")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=2, help="steps that are left out")
    parser.add_argument("--requests", type=int, default=20, help="of each latency")
    parser.add_argument("--dead-share", type=float, default=0.75, help="data without signal, of the part skip")
    parser.add_argument("--taught-steps", type=int, default=60, help="of sl_loop, of the part rl")
    parser.add_argument("--rl-steps", type=int, default=8, help="of math_rl, of the part rl")
    parser.add_argument("--leave-out", nargs="*", default=[], choices=PARTS)
    parser.add_argument("--json", type=pathlib.Path, help="also write what is printed there")
    given = parser.parse_args(arguments)
    for name in ("hidden", "layers", "batch", "text_tokens", "requests"):
        if vars(given)[name] < 1:
            parser.error(f"--{name.replace('_', '-')} {vars(given)[name]} must be at least 1")
    if given.steps <= given.warmup:
        parser.error(f"--steps {given.steps} must be more than --warmup {given.warmup}")
    return given


def make_texts(given: argparse.Namespace) -> list[tuple[str, str]]:
    """Return a question and an answer for each text of all steps."""
    numbers = random.Random(0)
    texts = []
    for i in range(given.batch * given.steps):
        length = numbers.randint(max(1, given.text_tokens // 2), given.text_tokens)
        texts.append((f"{i % 10}?", "".join(numbers.choice("0123456789") for _ in range(length))))
    return texts


def time_cookbook(given: argparse.Namespace, folder: pathlib.Path, texts: list[tuple[str, str]]) -> dict[str, float]:
    """Train on the texts by sl_loop through the server."""
    rows = [{"messages": [_said("user", question), _said("assistant", answer)]} for question, answer in texts]
    data = folder / "inputs" / "HuggingFaceH4" / "no_robots" / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    log = folder / "sl_loop"
    with served(folder, SERVER) as address:
        _recipe("sl_loop", folder, log.name, address, f"batch_size={given.batch}", "save_every=0", "learning_rate=1e-3")
    steps = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()][given.warmup :]
    return _rates([(step["num_tokens"], step["time_total"]) for step in steps])


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def time_trainer(given: argparse.Namespace, folder: pathlib.Path, texts: list[tuple[str, str]]) -> dict[str, float]:
    """Train on the texts by the trainer's supervised steps, in the chat form that the cookbook renders."""
    start = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    rows = [{"prompt": start.format(question), "answer": "", "solution": answer} for question, answer in texts]
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = folder / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc_per_node", "2"]
    command += ["-m", "megatron_rl.train", "--run-dir", str(run), f"model.hf_path={folder / 'inputs' / CHAT}"]
    command += [f"data.train={data}", "parallel.pipeline=2", "reward.functions=[arithmetic]", "train.num_rollouts=0"]
    command += [f"sft.steps={given.steps}", f"sft.samples_per_step={given.batch}", "metrics.progress=false"]
    command += ["data.max_prompt_tokens=128", f"rollout.max_response_tokens={given.text_tokens + 8}"]
    command += ["train.export_last=false", "plan.max_tokens_per_microbatch=4096", "plan.share_prompts=false"]
    _run(command, ROOT)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][given.warmup :]
    tokens = [step["perf/dense_equivalent_tokens_per_second"] * step["time/update_s"] for step in steps]
    return _rates([(of, step["time/step_s"]) for of, step in zip(tokens, steps, strict=True)])


def _run(command: list[str], folder: pathlib.Path) -> None:
    environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(folder / "datasets")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command[:4])} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )


def _rates(steps: list[tuple[float, float]]) -> dict[str, float]:
    return {
        "tokens_of_a_step": statistics.median(tokens for tokens, _ in steps),
        "step_s": statistics.median(seconds for _, seconds in steps),
        "tokens_per_s": statistics.median(tokens / seconds for tokens, seconds in steps),
    }


def time_requests(given: argparse.Namespace, folder: pathlib.Path, logprobs: str, parts: list[str]) -> dict[str, float]:
    """Time single requests, and requests part of whose data train nothing; milliseconds."""
    from tests.faults.serve_client import Client

    found = {}
    with served(folder, (*SERVER, f"serve.logprobs={logprobs}")) as address:
        client = Client(address)
        session = client.session()
        model = client.model(session, base=CHAT)
        numbers = iter(range(1, 10**9))
        if "latency" in parts:
            sampler = client.ask(
                "create_sampling_session",
                {"session_id": session, "sampling_session_seq_id": 0, "base_model": CHAT},
            )["sampling_session_id"]
            samples = iter(range(10**9))
            found["empty optim_step"] = _median_ms(
                given.requests, lambda: client.result(client.step(model, next(numbers)))
            )
            found["sample of one token"] = _median_ms(
                given.requests, lambda: client.result(client.sample(sampler, next(samples), [10, 11], max_tokens=1))
            )
            found["training request of one datum"] = _median_ms(
                given.requests, lambda: client.result(client.train(_body(model, next(numbers), 1, 64, 0.0)))
            )
        if "skip" in parts:
            for name, dead in (("all with signal", 0.0), (f"{given.dead_share:.0%} without signal", given.dead_share)):
                found[f"{logprobs}: {name}"] = _median_ms(
                    given.requests,
                    lambda dead=dead: client.result(
                        client.train(_body(model, next(numbers), given.batch, given.text_tokens, dead))
                    ),
                )
    return found


def time_rl(given: argparse.Namespace, folder: pathlib.Path) -> dict[str, dict[str, float]]:
    """Teach a model its sums, then train it on by math_rl under each way of skipping; medians over the steps."""
    make_workplace(folder / "inputs", layers=given.layers, hidden=given.hidden, boxed=True)
    with served(folder, SERVER) as address:
        sl = ["batch_size=32", "max_length=600", "learning_rate=4e-3", "train_on_what=last_assistant_message"]
        sl += ["save_every=0", f"max_steps={given.taught_steps}"]
        _recipe("sl_loop", folder, "taught", address, *sl)
    start = json.loads((folder / "taught" / "checkpoints.jsonl").read_text().splitlines()[-1])["state_path"]
    rl = ["env=gsm8k", "renderer_name=qwen3", "group_size=8", "groups_per_batch=16", "max_tokens=40", "eval_every=0"]
    rl += ["learning_rate=1e-6", "save_every=0", f"max_steps={given.rl_steps}", f"load_checkpoint_path={start}"]
    found = {}
    for name, settings in (
        ("skip off", ("skip.mode=off",)),
        ("skip", ("serve.least_advantage=1e-6",)),
        ("skip, log-probs of what trains", ("serve.least_advantage=1e-6", "serve.logprobs=trained")),
    ):
        before = set((folder / "server" / "models").glob("*/metrics.jsonl"))
        with served(folder, (*SERVER, *settings)) as address:
            _recipe("math_rl.train", folder, f"rl-{len(found)}", address, *rl)
        (path,) = set((folder / "server" / "models").glob("*/metrics.jsonl")) - before
        rows = [json.loads(line) for line in path.read_text().splitlines()][given.warmup :]
        names = ("time/update_s", "skip/zero_advantage_ratio", "skip/tokens_executed", "skip/tokens_dense")
        found[name] = {key: statistics.median(row[key] for row in rows) for key in names}
    return found


def _recipe(recipe: str, folder: pathlib.Path, log: str, address: str, *arguments: str) -> None:
    command = [sys.executable, "-m", f"tinker_cookbook.recipes.{recipe}", f"model_name={CHAT}", f"base_url={address}"]
    _run([*command, f"log_path={folder / log}", *arguments], folder / "inputs")


def _body(model: str, seq: int, count: int, length: int, dead_share: float) -> bytes:
    """Return a request of ``count`` data of ``length`` tokens, of which the last share has weights of 0."""
    import numpy as np

    from megatron_rl.serve import messages
    from tests.faults.serve_client import put

    message = messages.ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn="cross_entropy")
    for i in range(count):
        tokens = np.random.default_rng([i, count]).integers(0, 200, length + 1)
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = tokens[:-1].astype(np.int32).tobytes()
        put(datum, "target_tokens", tokens[1:].astype(np.int64))
        weight = 0.0 if i >= round(count * (1 - dead_share)) else 1.0
        put(datum, "weights", np.full(length, weight, dtype=np.float32))
    return message.SerializeToString()


def _median_ms(count: int, call: Callable[[], object]) -> float:
    times = []
    for _ in range(count + 1):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times[1:])


def main(arguments: list[str] | None = None) -> None:
    given = parse(arguments)
    parts = [part for part in PARTS if part not in given.leave_out]
    found: dict[str, object] = {"settings": {k: v for k, v in vars(given).items() if k not in ("json", "leave_out")}}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        make_workplace(folder / "inputs", layers=given.layers, hidden=given.hidden)
        if "train" in parts:
            texts = make_texts(given)
            found["cookbook"] = time_cookbook(given, folder, texts)
            found["trainer"] = time_trainer(given, folder, texts)
            found["cookbook over trainer"] = found["cookbook"]["tokens_per_s"] / found["trainer"]["tokens_per_s"]
        for logprobs in ("all", "trained") if "skip" in parts else ("all",) if "latency" in parts else ():
            own = folder / logprobs
            own.mkdir()
            (own / "inputs").symlink_to(folder / "inputs")
            asked = [part for part in parts if part == "skip" or logprobs == "all"]
            found.setdefault("milliseconds", {}).update(time_requests(given, own, logprobs, asked))
        if "rl" in parts:
            found["rl"] = time_rl(given, folder / "rl")
    print(json.dumps(found, indent=1))
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
