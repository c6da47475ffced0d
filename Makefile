# Every target sets the environment up by itself, once, and works offline afterwards.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test check bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-6s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY)  ## make the environment (.venv/) alone

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"arc-cl needs Python >= 3.11, $(PYTHON) is {v[0]}.{v[1]}: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[bench,dev]'
	@touch $@

demo: $(READY)  ## train, repair, compare: the main job in about a minute, on a CPU, without a download
	$(BIN)/arc-cl demo

test: $(READY)  ## run the test suite
	$(BIN)/python -m pytest

check: $(READY)  ## lint, formatting and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(READY)  ## measure the speed of replay beside its floor and plain autograd
	$(BIN)/arc-cl bench

clean:  ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -prune -exec rm -rf {} +
