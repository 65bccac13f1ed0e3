# make demo   train, break, rescue: the whole product in a few minutes
# make test   the test suite
# make slow   what the suite leaves out for time: rare engine settings, four ranks
# make check  formatting, lint, types
# make bench  the cost of the guard per step
#
# The first target run on a fresh machine creates .venv and installs everything into it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Several ranks share the cores of one machine: one thread each.
export OMP_NUM_THREADS ?= 1
export DS_ACCELERATOR ?= cpu
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: demo test slow check bench format clean

# torch goes first and pinned, so that pip does not choose another build of it while resolving the rest.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'torch==2.13.0'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/resilient demo

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow"

slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m resilient.bench.overhead

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
