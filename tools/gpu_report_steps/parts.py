"""Lists the steps of tools/gpu_report.py, as data only: their parts, commands and time limits.

Each part takes ten minutes and stands in the order of its worth. In a command, {python} is the interpreter, {tools} the
folder of tools/, {out} the step's JSON file, {work} a folder of its own, {smollm2} the wheel of SmolLM2. A limit is
about twice the seconds seen on an H100 beside 16 cores, or twice what is inferred where nothing was seen.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Describes one command.

    cores: those that it takes of the steps that run side by side, before the others of its part; 0 where it measures
        time and runs alone.
    carried: what it needs beside the base, a name of EXTRAS.
    cpu: its small form for a host without a GPU; "" where only a GPU can run it, with the reason in `needs`.
    limit_s: seconds after which it is killed.
    shares: its script runs in the process that such steps before it have warmed up; not where it measures first calls
        or torch's own defaults, profiles, or needs packages that no second step of its part does.
    """

    name: str
    part: int
    measures: str
    command: str
    limit_s: float
    cores: int = 0
    carried: str = ""
    cpu: str = ""
    needs: str = "needs a GPU"
    shares: bool = False


PARTS = {
    1: "whether it runs, and whether the skip pays",
    2: "Transformer Engine, speed and the trainer's state",
    3: "several ranks over NCCL on one GPU, faults, channels of weight sync",
    4: "SmolLM2-135M, with its held-out score",
    5: "vLLM",
}
EXTRAS = {"te": "Transformer Engine", "smollm2": "SmolLM2's wheel", "vllm": "vLLM"}
CELLS = "{python} {tools}/acceptance.py --json {out} --only "
RUN = "{python} {tools}/gpu_report_steps/"
SKIP = "{python} {tools}/benchmarks/skip.py --json {out} "
LOGPROB = "{python} {tools}/benchmarks/logprob.py --json {out} "
SKIP_SHAPE = (
    "--hf-path {tools}/gpu_report_steps/qwen2.5-1.5b --dtype bfloat16 --groups 8 --group-size 4 --mean-tokens 2048 "
    "--max-tokens-per-microbatch 8192 --dead-share 0 0.75 1 --repeats 2"
)
SHARED = "{python} {tools}/benchmarks/shared_prompts.py --json {out} "
SHARED_SHAPE = (
    "--hf-path {tools}/gpu_report_steps/qwen2.5-1.5b --dtype bfloat16 --groups 8 --group-size 8 --ratio 1:1 16:1 "
    "--response-tokens 128 --max-tokens-per-microbatch 8192 --repeats 2"
)
SHARED_SMALL = "--hidden 64 --layers 2 --vocab 512 --groups 4 --group-size 4 --ratio 4:1 --response-tokens 8"
SKIP_SMALL = "--hidden 64 --layers 2 --vocab 512 --groups 8 --mean-tokens 32 --dead-share 0 0.75 1 --repeats 1"
TORCH_LAYERS, TE_LAYERS = " --set model.layer_spec=torch", " --set model.layer_spec=transformer_engine"
LOGPROB_SMALL = "--tokens 1024 --vocab 16000 --hidden 64 --threads 1 --repeats 1"
LOGPROB_SHAPE = "--tokens 8192 --vocab 151936 --dtype bfloat16 --plain-limit-gb 12 --repeats 3"
ONE_PROCESS = (
    "=single,=bf16-single,=family-qwen2_untied,=family-qwen3,=family-llama,=family-llama3_rope,=recompute,=adam-torch,"
    "=moe-single"
)
TE_ONE_PROCESS = "=te-single,=adam-transformer_engine,=te-family-qwen3,=te-family-llama,=te-recompute"
FEATURES = (
    "=lora,=critic,=offload,=checkpoint,=sync-shared-memory,=sync-cuda-ipc,=rollout-embedded,=long,=bf16-long,=replay"
)
TWO_RANKS = "=pp2,=tp2,=dp2,=tp2-sp,=dp2-overlap,=cp2,=pp2-vpp2,=ep2,=dp2-plain"
FOUR_RANKS = "=tp2-pp2,=bf16-pp2-dp2,=ep2-pp2,=cp2-pp2"
SHARED_FEATURES = "=checkpoint-dp2,=offload-dp2,=lora-tp2-sp,=lora-pp2,=critic-tp2,=checkpoint-pp2,=sync-broadcast"
TE_TWO_RANKS = "=te-tp2-sp,=te-cp2"
ENGINES = "=vllm,=vllm-delta,=vllm-adapters"
CLOCKS = "=memory,=speed"
DELTA_NETS = "=delta-net,=delta-net-bf16,=delta-net-fla"
LOGPROBS = {
    "own chunk": " --hidden 3584",
    "Triton kernels": " --hidden 3584 --kernel triton",
    "512 tokens a chunk": " --hidden 3584 --chunk-tokens 512",
    "4,096": " --hidden 3584 --chunk-tokens 4096",
    "hidden 896": " --hidden 896",
}


def logprobs(label: str, part: int) -> Step:
    more = LOGPROBS[label]
    small = LOGPROB + LOGPROB_SMALL + (" --chunk-tokens 64" if "chunk" in more else "")
    return Step(
        name=f"log-probs, {label}",
        part=part,
        measures="seconds and peak memory of log-probs of 8,192 tokens, vocabulary 151,936, with their gradient",
        command=LOGPROB + LOGPROB_SHAPE + more,
        cpu="" if "triton" in more else small,
        limit_s=20,
        shares=True,
    )


def quickstart(label: str, part: int, measures: str, words: str, *, cores: int = 0, carried: str = "") -> Step:
    command = RUN + "short_run.py --json {out} --work {work}"
    return Step(
        name=f"run, {label}",
        part=part,
        measures=measures,
        command=command + words,
        cpu=command + " --small" + words,
        limit_s=240 if carried else 120 if cores else 60,
        cores=cores,
        carried=carried,
    )


def state(which: str, measures: str, limit_s: float) -> Step:
    command = RUN + f"state.py --json {{out}} --work {{work}} --part {which}"
    small = command + " --small"
    return Step(name=which, part=2, measures=measures, command=command, cpu=small, limit_s=limit_s, shares=True)


FIRST = (
    Step(
        name="doctor",
        part=1,
        measures="faults of the installation",
        command="{python} -m megatron_rl.doctor --json {out}",
        cpu="{python} -m megatron_rl.doctor --json {out}",
        limit_s=60,
        cores=1,
    ),
    Step(
        name="doctor, Transformer Engine",
        part=1,
        measures="the same with Transformer Engine",
        command="{python} -m megatron_rl.doctor --json {out}",
        carried="te",
        limit_s=60,
        cores=1,
    ),
    Step(
        name="cells, one process",
        part=1,
        measures="the equalities of tools/acceptance.py on one GPU",
        command=CELLS + ONE_PROCESS + " --timeout 90 --jobs 5",
        cpu=CELLS + "=single --timeout 120",
        limit_s=120,
        cores=5,
    ),
    Step(
        name="cells, Transformer Engine",
        part=1,
        measures="the same on Transformer Engine's layers, in bfloat16",
        command=CELLS + TE_ONE_PROCESS + " --timeout 90 --jobs 3",
        carried="te",
        limit_s=160,
        cores=3,
    ),
    Step(
        name="cells, features",
        part=1,
        measures="adapters, critic, offload, checkpoint, weight sync, engine, long sequences on one GPU",
        command=CELLS + FEATURES + " --timeout 90 --jobs 4",
        cpu=CELLS + "=lora --timeout 120",
        limit_s=120,
        cores=4,
    ),
    Step(
        name="collectives",
        part=1,
        measures="every collective that the package uses, two ranks on one GPU, against its definition",
        command="{python} -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc_per_node 2 "
        "{tools}/gpu_report_steps/collectives.py --json {out} --share-gpu",
        cpu="{python} -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc_per_node 2 "
        "{tools}/gpu_report_steps/collectives.py --json {out}",
        limit_s=60,
        cores=2,
    ),
    Step(
        name="skip",
        part=1,
        measures="dense and skip updates of Qwen2.5-1.5B's shapes, bfloat16, torch's layers",
        command=SKIP + SKIP_SHAPE + TORCH_LAYERS,
        cpu=SKIP + SKIP_SMALL + TORCH_LAYERS,
        limit_s=110,
        shares=True,
    ),
    Step(
        name="skip, Transformer Engine",
        part=1,
        measures="the same updates on Transformer Engine's layers",
        command=SKIP + SKIP_SHAPE + TE_LAYERS,
        carried="te",
        limit_s=120,
    ),
    logprobs("own chunk", 1),
    logprobs("Triton kernels", 1),
    quickstart(
        "bfloat16",
        1,
        "the quickstart, 20 rollouts, embedded engine, bfloat16: reward and seconds of each part of a rollout",
        " --set model.dtype=bfloat16",
    ),
    Step(
        name="shared prompts",
        part=1,
        measures="updates with prompts run once and no needless pass, against before; Qwen2.5-1.5B's shapes, bfloat16",
        command=SHARED + SHARED_SHAPE + TORCH_LAYERS,
        cpu=SHARED + SHARED_SMALL + TORCH_LAYERS,
        limit_s=90,
        shares=True,
    ),
)
SECOND = (
    quickstart(
        "adapters",
        2,
        "five rollouts of adapters, bfloat16: finite, and exported",
        " --adapters --set model.dtype=bfloat16",
        cores=1,
    ),
    Step(
        name="cells, gated delta nets",
        part=2,
        measures="a tiny Qwen3.5, dense and skip, by torch's kernels and by flash-linear-attention's",
        command=CELLS + DELTA_NETS + " --timeout 120 --jobs 3",
        cpu=CELLS + "=delta-net --timeout 120",
        limit_s=150,
        cores=3,
    ),
    Step(
        name="topology",
        part=2,
        measures="the GPUs' links",
        command="nvidia-smi topo -m",
        needs="needs nvidia-smi",
        limit_s=15,
        cores=1,
    ),
    Step(
        name="profile",
        part=2,
        measures="kernels, idle share and waits for the device in one update, by torch's profiler, torch's layers",
        command=RUN + "profile_update.py --json {out}" + TORCH_LAYERS,
        cpu=RUN + "profile_update.py --json {out} --small" + TORCH_LAYERS,
        limit_s=100,
    ),
    Step(
        name="profile, Transformer Engine",
        part=2,
        measures="the same on Transformer Engine's layers",
        command=RUN + "profile_update.py --json {out}" + TE_LAYERS,
        carried="te",
        limit_s=110,
    ),
    Step(
        name="packed attention",
        part=2,
        measures="attention over packed sequences against a masked softmax, and its FLOP/s",
        command=RUN + "packed_attention.py --json {out}",
        cpu=RUN + "packed_attention.py --json {out} --small",
        limit_s=20,
        shares=True,
    ),
    Step(
        name="delta net",
        part=2,
        measures="tokens a second of a gated delta net of Qwen3.5-9B's shapes, by torch's and by fla-core's kernels",
        command=RUN + "delta_net.py --json {out}",
        cpu=RUN + "delta_net.py --json {out} --small",
        limit_s=60,
    ),
    state(
        "offload", "seconds, GB/s and bytes of offload and restore, and whether the state is the same to the bit", 90
    ),
    state("checkpoint", "seconds and peak memory of save and load, and whether the state is the same to the bit", 110),
    Step(
        name="cells, memory and speed",
        part=2,
        measures="memory of the log-probs and time of the skip update against their bounds",
        command=CELLS + CLOCKS + " --timeout 60",
        cpu=CELLS + "=memory --timeout 120",
        limit_s=110,
    ),
    Step(
        name="attention",
        part=2,
        measures="seconds of scaled-dot-product attention at 12 unseen lengths, first and second call, by backend",
        command=RUN + "attention.py --json {out}",
        cpu=RUN + "attention.py --json {out} --small",
        limit_s=75,
    ),
    state("reference", "seconds of swapping the reference policy's weights in and out", 110),
    logprobs("512 tokens a chunk", 2),
    logprobs("4,096", 2),
    logprobs("hidden 896", 2),
    quickstart("float32", 2, "the quickstart in float32", ""),
)
THIRD = (
    Step(
        name="cells, two ranks",
        part=3,
        measures="the equalities over NCCL, two ranks on one GPU",
        command=CELLS + TWO_RANKS + " --share-gpu --timeout 90 --jobs 3",
        cpu=CELLS + "=pp2 --timeout 120",
        limit_s=190,
        cores=6,
    ),
    Step(
        name="cells, features of two ranks",
        part=3,
        measures="the features over NCCL, two ranks on one GPU",
        command=CELLS + SHARED_FEATURES + " --share-gpu --timeout 90 --jobs 2",
        cpu=CELLS + "=sync-broadcast --timeout 120",
        limit_s=170,
        cores=4,
    ),
    Step(
        name="cells, Transformer Engine, two ranks",
        part=3,
        measures="Transformer Engine's layers over NCCL, two ranks on one GPU",
        command=CELLS + TE_TWO_RANKS + " --share-gpu --timeout 90",
        carried="te",
        limit_s=180,
        cores=2,
    ),
    Step(
        name="cells, four ranks",
        part=3,
        measures="the equalities over NCCL, four ranks on one GPU",
        command=CELLS + FOUR_RANKS + " --share-gpu --timeout 90 --jobs 2",
        cpu=CELLS + "=tp2-pp2 --timeout 120",
        limit_s=200,
        cores=6,
    ),
    Step(
        name="faults",
        part=3,
        measures="whether a stopped rank and a rank asleep in Python are named, and end the run",
        command=RUN + "faults.py --json {out} --work {work} --share-gpu",
        cpu=RUN + "faults.py --json {out} --work {work}",
        limit_s=200,
    ),
    Step(
        name="channels",
        part=3,
        measures="GB/s of every channel of weight sync into another process, and whether all bytes arrive",
        command=RUN + "channels.py --json {out}",
        cpu=RUN + "channels.py --json {out} --small",
        limit_s=120,
    ),
)
FOURTH = (
    Step(
        name="SmolLM2",
        part=4,
        measures="40 rollouts of a real model on word problems, embedded engine: held-out score and seconds",
        command=RUN + "smollm2_run.py --json {out} --work {work} --wheel {smollm2}",
        cpu=RUN + "smollm2_run.py --json {out} --work {work} --wheel {smollm2} --small",
        carried="smollm2",
        limit_s=500,
    ),
)
FIFTH = (
    Step(
        name="engine, eager",
        part=5,
        measures="whether a vLLM engine starts, its tokens a second, and its sleep; Qwen2.5-0.5B's shapes, bfloat16",
        command=RUN + "engine.py --json {out} --eager",
        carried="vllm",
        limit_s=150,
    ),
    Step(
        name="engine",
        part=5,
        measures="the same with CUDA graphs and torch.compile",
        command=RUN + "engine.py --json {out}",
        carried="vllm",
        limit_s=200,
    ),
    quickstart(
        "vLLM, drafts",
        5,
        "the quickstart with vLLM, bfloat16, drafts from earlier answers: reward, seconds, tokens drafted and taken",
        " --set model.dtype=bfloat16 rollout.engine=vllm rollout.speculation=history run.deadline_s=200 "
        "rollout.start_s=150 rollout.request_s=100",
        carried="vllm",
    ),
    Step(
        name="cells, vLLM",
        part=5,
        measures="runs with vLLM on the trainer's GPU, with sleep; what changed alone, and adapters alone",
        command=CELLS + ENGINES + " --timeout 240",
        carried="vllm",
        limit_s=450,
    ),
)
STEPS = (*FIRST, *SECOND, *THIRD, *FOURTH, *FIFTH)
