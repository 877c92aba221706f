# What people type. PYTHON picks the interpreter: 3.11 to 3.13.
PYTHON ?= $(shell for v in 3.11 3.12 3.13; do command -v python$$v >/dev/null && python$$v -c '' 2>/dev/null && echo python$$v && break; done || true)
ifeq ($(strip $(PYTHON)),)
PYTHON := python3
endif
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# On Linux without an NVIDIA GPU, torch comes without CUDA if its own index can be reached, otherwise from PyPI.
ifneq ($(wildcard /dev/nvidia[0-9]*),)
GPU := -gpu
else ifeq ($(shell uname -s),Linux)
CPU_INDEX := --extra-index-url https://download.pytorch.org/whl/cpu
endif
INSTALL_TORCH = $(PIP) --no-deps --retries 1 $(CPU_INDEX) torch

.DEFAULT_GOAL := help
.PHONY: help run test test-long test-cluster test-api-server fuzz lint lint-all types unit format clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(VENV)/.run  ## install what the example in digits/ needs, then run it: pipe demo
	$(BIN)/pipe demo

test: lint  ## ruff, mypy over the source, and every test but the long ones
	$(MAKE) --jobs 2 types unit

# One thread of torch for each process: threads that wait for a busy core spin.
unit test-long: export OMP_NUM_THREADS = 1
test-long: $(VENV)/.dev  ## the tests that take minutes
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "long and not gpu" \
	  --durations 30 --durations-min 0

# Only a KUBECONFIG on the command line counts: the tests drain nodes, and the environment may name any cluster.
test-cluster: export PIPE_TEST_CLUSTER = $(if $(findstring command,$(origin KUBECONFIG)),$(KUBECONFIG))
test-cluster: $(VENV)/.dev  ## the tests on a real cluster: make test-cluster KUBECONFIG=FILE
	$(BIN)/python -m pytest -m cluster -v tests/cluster

# Its API server is on this machine; where none can be started, pytest prints why.
test-api-server: export PIPE_TEST_CLUSTER =
test-api-server: $(VENV)/.dev  ## the tests of an API server without nodes, as CI runs them
	$(BIN)/python -m pytest -m cluster -k "not outage" \
	  tests/cluster/test_access.py tests/cluster/test_control_plane.py tests/cluster/test_objects.py

# atheris is for Linux and CPython up to 3.13, and nothing else needs it.
MINUTES := 10
fuzz: $(VENV)/.dev  ## random bytes for every parser of the service: make fuzz MINUTES=10
	$(PIP) atheris
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES)

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/mypy pipeline train export serve k8s

# One cache for all: the examples import what was checked already.
lint-all: export MYPY_CACHE_DIR = $(CURDIR)/.mypy_cache
lint-all: lint  ## mypy over tests, benchmarks and examples too, as CI runs it after `make test`
	$(BIN)/mypy
	cd examples/digits && ../../$(BIN)/mypy --config-file ../../pyproject.toml task.py codec.py
	cd examples/starter && ../../$(BIN)/mypy --config-file ../../pyproject.toml task.py codec.py
	for folder in examples/templates/*/; do \
	  (cd $$folder && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml task.py codec.py) || exit 1; done
	cd examples/deepseek/pretrain && ../../../$(BIN)/mypy --config-file ../../../pyproject.toml task.py codec.py
	cd examples/deepseek/classify && ../../../$(BIN)/mypy --config-file ../../../pyproject.toml task.py codec.py

unit: $(VENV)/.dev
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 4 --no-loadscope-reorder \
	  -m "not long and not gpu" --durations 10 --durations-min 0

format: $(VENV)/.dev  ## format and fix with ruff
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove the virtual environment and caches, never runs/
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# The project is installed editable: examples and manifests are read from the checkout.
$(VENV)/.run: $(VENV)/bin/python pyproject.toml constraints.txt
	$(INSTALL_TORCH)
	$(PIP) -e '.[train$(GPU),examples]'
	touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(INSTALL_TORCH)
	$(PIP) -e '.[all$(GPU),dev$(if $(GPU),,,genai)]'
	touch $@ $(VENV)/.run
