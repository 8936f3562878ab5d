# `make help` says what there is. Everything happens in .venv, which is made where there is none.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check
TORCH := torch==2.13.0

.DEFAULT_GOAL := help
.PHONY: help setup dev demo test check clean gpu gpu-dry gpu-wheels

help: ## say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.setup ## .venv with all that serving needs, an embedded Redis included

dev: $(VENV)/.dev ## the same, and what tests and checks need

demo: setup ## the main job, end to end, and nothing left behind
	@$(BIN)/dendro demo

test: dev ## all tests but the longest, which CI runs too; in two processes
	@$(BIN)/python -m pytest -m "not long" -n 2 --dist loadfile

check: dev ## ruff, mypy, import contracts, generated stubs up to date
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy protos/dendro kernels/tree_kernels kernels/tree_layers drafter_service verifier_service cluster
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/lint-imports
	@$(BIN)/python protos/generate.py --check

# A GPU machine has torch, triton, transformers and pytest, but no .venv and no network. Our other dependencies are
# taken there as wheels, in .wheels.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
GPU_OUT ?= gpu-results/$(shell date -u +%Y%m%d-%H%M%S)
WHEELS := .wheels
WHEEL_TARGET := --python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64

gpu: ## all checks and measurements that need a GPU, in ten minutes; results in gpu-results/
	@$(GPU_PYTHON) tests/gpu/run.py --wheels $(WHEELS) --out $(GPU_OUT)

gpu-dry: ## the same here, in Triton's interpreter, with tiny sizes
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

# torch comes first and by version: what is installed after it takes it as it is.
$(VENV)/.setup: pyproject.toml | $(BIN)/python
	@echo "installing torch (the largest part)"
	@$(PIP) "$(TORCH)"
	@echo "installing dendroaspis and what it serves with"
	@$(PIP) --editable '.[serve,embedded]'
	@touch $@

$(VENV)/.dev: $(VENV)/.setup
	@echo "installing what tests and checks need"
	@$(PIP) --editable '.[serve,embedded,dev]'
	@touch $@
