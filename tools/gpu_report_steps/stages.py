"""Lists the steps of tools/gpu_report.py, as data only: their stages, commands and time limits.

In a command, {python} is the interpreter, {tools} the folder of tools/, {out} the step's JSON file, {work} a folder of
its own, {wheels} the folder of wheels, {site} the folder that they are installed in.
"""

from __future__ import annotations

from dataclasses import dataclass

STAGE_S = 570.0  # of one call: half a minute below ten, for its start and end


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Describes one command.

    cpu: its small form for a host without a GPU; "" where only a GPU can run it, with the reason in `needs`.
    limit_s: seconds after which it is killed.
    """

    name: str
    stage: int
    measures: str
    command: str
    limit_s: float
    cpu: str = ""
    needs: str = "needs a GPU"


STAGES = {
    1: "installation, attention, cells of one process",
    2: "several ranks on one GPU over NCCL's sockets",
    3: "speed",
    4: "the rest of the trainer",
}
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
    "--response-tokens 128 --max-tokens-per-microbatch 16384 --repeats 2"
)
SHARED_SMALL = "--hidden 64 --layers 2 --vocab 512 --groups 4 --group-size 4 --ratio 4:1 --response-tokens 8"
SKIP_SMALL = "--hidden 64 --layers 2 --vocab 512 --groups 8 --mean-tokens 32 --dead-share 0 0.75 1 --repeats 1"
LOGPROB_SMALL = "--tokens 1024 --vocab 16000 --hidden 64 --threads 1 --repeats 1"
LOGPROB_SHAPE = "--tokens 8192 --vocab 151936 --dtype bfloat16 --plain-limit-gb 12 --repeats 3"
ONE_PROCESS = (
    "=single,=bf16-single,=family-qwen2_untied,=family-qwen3,=family-llama,=family-llama3_rope,=recompute,=adam-torch,"
    "=moe-single"
)
TWO_RANKS = "=pp2,=tp2,=dp2,=tp2-sp,=dp2-overlap,=cp2,=pp2-vpp2,=ep2,=dp2-plain"
FOUR_RANKS = "=tp2-pp2,=bf16-pp2-dp2,=cp2-pp2,=ep2-pp2"
FEATURES = "=lora,=critic,=offload,=checkpoint,=sync-shared-memory,=sync-cuda-ipc,=rollout-embedded,=long,=bf16-long"
CLOCKS = "=memory,=speed"
SHARED_FEATURES = "=checkpoint-dp2,=offload-dp2,=lora-tp2-sp,=lora-pp2,=critic-tp2,=checkpoint-pp2,=sync-broadcast"

PIP = (
    "{python} -m pip install --quiet --no-index --no-deps --no-compile --find-links {wheels} --upgrade --target {site} "
    "--requirement {wheels}/requirements.txt"
)
INSTALL = Step(
    name="install", stage=0, measures="the wheels, from their folder alone", command=PIP, cpu=PIP, limit_s=60
)
STEPS = (
    Step(
        name="doctor",
        stage=1,
        measures="faults of the installation",
        command="{python} -m megatron_rl.doctor --json {out}",
        cpu="{python} -m megatron_rl.doctor --json {out}",
        limit_s=60,
    ),
    Step(
        name="topology",
        stage=1,
        measures="the GPUs' links",
        command="nvidia-smi topo -m",
        needs="needs nvidia-smi",
        limit_s=15,
    ),
    Step(
        name="attention",
        stage=1,
        measures="seconds of scaled-dot-product attention at 12 unseen lengths, first and second call, by backend",
        command=RUN + "attention.py --json {out}",
        cpu=RUN + "attention.py --json {out} --small",
        limit_s=75,
    ),
    Step(
        name="packed attention",
        stage=1,
        measures="attention over packed sequences against a masked softmax, and its FLOP/s",
        command=RUN + "packed_attention.py --json {out}",
        cpu=RUN + "packed_attention.py --json {out} --small",
        limit_s=60,
    ),
    Step(
        name="cells, one process",
        stage=1,
        measures="the equalities of tools/acceptance.py on one GPU",
        command=CELLS + ONE_PROCESS + " --timeout 90 --jobs 4",
        cpu=CELLS + "=single --timeout 120",
        limit_s=240,
    ),
    Step(
        name="collectives",
        stage=2,
        measures="every collective that the package uses, two ranks on one GPU, against its definition",
        command="{python} -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc_per_node 2 "
        "{tools}/gpu_report_steps/collectives.py --json {out} --share-gpu",
        cpu="{python} -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc_per_node 2 "
        "{tools}/gpu_report_steps/collectives.py --json {out}",
        limit_s=45,
    ),
    Step(
        name="cells, two ranks",
        stage=2,
        measures="the equalities over NCCL, two ranks on one GPU",
        command=CELLS + TWO_RANKS + " --share-gpu --timeout 90 --jobs 2",
        cpu=CELLS + "=pp2 --timeout 120",
        limit_s=245,
    ),
    Step(
        name="faults",
        stage=2,
        measures="whether a stopped rank and a rank asleep in Python are named, and end the run",
        command=RUN + "faults.py --json {out} --work {work} --share-gpu",
        cpu=RUN + "faults.py --json {out} --work {work}",
        limit_s=130,
    ),
    Step(
        name="cells, four ranks",
        stage=2,
        measures="the equalities over NCCL, four ranks on one GPU",
        command=CELLS + FOUR_RANKS + " --share-gpu --timeout 75",
        cpu=CELLS + "=tp2-pp2 --timeout 120",
        limit_s=150,
    ),
    Step(
        name="skip",
        stage=3,
        measures="dense and skip updates of Qwen2.5-1.5B's shapes, bfloat16",
        command=SKIP + SKIP_SHAPE,
        cpu=SKIP + SKIP_SMALL,
        limit_s=140,
    ),
    Step(
        name="shared prompts",
        stage=3,
        measures="updates with prompts run once and no needless pass, against before; Qwen2.5-1.5B's shapes, bfloat16",
        command=SHARED + SHARED_SHAPE,
        cpu=SHARED + SHARED_SMALL,
        limit_s=120,
    ),
    *(
        Step(
            name=f"log-probs, {label}",
            stage=3,
            measures="seconds and peak memory of log-probs of 8,192 tokens, vocabulary 151,936, with their gradient",
            command=LOGPROB + LOGPROB_SHAPE + more,
            cpu="" if "triton" in more else LOGPROB + LOGPROB_SMALL + (" --chunk-tokens 64" if "chunk" in more else ""),
            limit_s=30,
        )
        for label, more in (
            ("own chunk", " --hidden 3584"),
            ("512 tokens a chunk", " --hidden 3584 --chunk-tokens 512"),
            ("4,096", " --hidden 3584 --chunk-tokens 4096"),
            ("Triton kernels", " --hidden 3584 --kernel triton"),
            ("hidden 896", " --hidden 896"),
        )
    ),
    Step(
        name="profile",
        stage=3,
        measures="kernels, idle share and waits for the device in one update, by torch's profiler",
        command=RUN + "profile_update.py --json {out}",
        cpu=RUN + "profile_update.py --json {out} --small",
        limit_s=75,
    ),
    Step(
        name="offload",
        stage=4,
        measures="seconds, GB/s and bytes of offload and restore, and whether the state is the same to the bit",
        command=RUN + "state.py --json {out} --work {work} --part offload",
        cpu=RUN + "state.py --json {out} --work {work} --part offload --small",
        limit_s=45,
    ),
    Step(
        name="channels",
        stage=4,
        measures="GB/s of every channel of weight sync into another process, and whether all bytes arrive",
        command=RUN + "channels.py --json {out}",
        cpu=RUN + "channels.py --json {out} --small",
        limit_s=65,
    ),
    Step(
        name="checkpoint",
        stage=4,
        measures="seconds and peak memory of save and load, and whether the state is the same to the bit",
        command=RUN + "state.py --json {out} --work {work} --part checkpoint",
        cpu=RUN + "state.py --json {out} --work {work} --part checkpoint --small",
        limit_s=65,
    ),
    Step(
        name="reference",
        stage=4,
        measures="seconds of swapping the reference policy's weights in and out",
        command=RUN + "state.py --json {out} --work {work} --part reference",
        cpu=RUN + "state.py --json {out} --work {work} --part reference --small",
        limit_s=60,
    ),
    *(
        Step(
            name=f"run, {label}",
            stage=4,
            measures=what,
            command=RUN + f"short_run.py --json {{out}} --work {{work}} {more}",
            cpu=RUN + f"short_run.py --json {{out}} --work {{work}} --small {more}",
            limit_s=limit_s,
        )
        for label, what, more, limit_s in (
            ("float32", "the quickstart, 20 rollouts, embedded engine: reward and seconds a rollout", "", 60),
            ("bfloat16", "the same in bfloat16", "--set model.dtype=bfloat16", 60),
            (
                "adapters",
                "five rollouts of adapters, bfloat16: finite, and exported",
                "--adapters --set model.dtype=bfloat16",
                40,
            ),
        )
    ),
    Step(
        name="cells, features",
        stage=4,
        measures="adapters, critic, offload, checkpoint, weight sync, engine, long sequences on one GPU",
        command=CELLS + FEATURES + " --timeout 75 --jobs 4",
        cpu=CELLS + "=lora --timeout 120",
        limit_s=100,
    ),
    Step(
        name="cells, memory and speed",
        stage=3,
        measures="memory of the log-probs and time of the skip update against their bounds",
        command=CELLS + CLOCKS + " --timeout 60",
        cpu=CELLS + "=memory --timeout 120",
        limit_s=60,
    ),
    Step(
        name="cells, features of two ranks",
        stage=4,
        measures="the same features over NCCL, two ranks on one GPU",
        command=CELLS + SHARED_FEATURES + " --share-gpu --timeout 60 --jobs 2",
        cpu=CELLS + "=sync-broadcast --timeout 120",
        limit_s=75,
    ),
)
