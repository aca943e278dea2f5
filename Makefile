# ckbench's workshop: every verb does the set-up it needs, once, in .venv. `make` alone lists the verbs.
#
#   make run                        GPT-2 small under five strategies, on CUDA where there is one, else on CPU
#   make run CONFIG=configs/smoke.yaml ARGS="--device cpu"
#   make setup PYTHON=python3.13    another interpreter (3.11 or newer), for a .venv that does not exist yet
#
# Another PyTorch, for example a build for your CUDA driver or the small one without CUDA (TORCH is handed to
# `pip install` as it is; the torch line of constraints.txt is left out then, and the choice is remembered
# in .venv until `make clean` or the next TORCH=...):
#
#   make run TORCH="torch==2.11.0 --index-url https://download.pytorch.org/whl/cu130"
#   make run TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
CONFIG ?= configs/gpt_small.yaml
ARGS   ?=

VENV := .venv
BIN  := $(VENV)/bin
CODE := ckbench $(wildcard tests benchmarks examples)

# The torch that .venv has; a TORCH that differs from it makes the set-up run again.
INSTALLED_TORCH := $(strip $(shell cat $(VENV)/torch-choice 2>/dev/null))
TORCH ?= $(INSTALLED_TORCH)
READY := $(VENV)/ready
ifneq ($(strip $(TORCH)),$(INSTALLED_TORCH))
$(READY): another-torch
endif

another-torch: # two builds of one version look the same to pip, so the old one goes first
	@! test -x $(BIN)/python || $(BIN)/python -m pip uninstall --quiet --yes torch

.DEFAULT_GOAL := help
.PHONY: help setup run fmt lint types test prove docs gpu-check smoke clean another-torch

help: ## list the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## make .venv with the tested versions, ckbench in editable mode, and the tools

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ckbench needs Python 3.11 or newer: make clean, then make setup PYTHON=...")'
	@rm -f $(READY)
ifeq ($(strip $(TORCH)),)
	cp constraints.txt $(VENV)/constraints.txt
else
	grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --disable-pip-version-check $(TORCH)
endif
	$(BIN)/python -m pip install --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[dev]'
	@echo '$(strip $(TORCH))' > $(VENV)/torch-choice
	@touch $(READY)

run: $(READY) ## measure CONFIG (configs/gpt_small.yaml) and print the table
	$(BIN)/ckbench run $(CONFIG) $(ARGS)

smoke: $(READY) ## the same for configs/smoke.yaml: half a minute on any laptop
	$(BIN)/ckbench run configs/smoke.yaml $(ARGS)

fmt: $(READY) ## format the code and sort its imports
	$(BIN)/ruff check --select I --fix-only --quiet $(CODE)
	$(BIN)/ruff format $(CODE)

lint: $(READY) ## check style and format (ruff)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)

types: $(READY) ## check types (mypy, strict)
	$(BIN)/mypy

test: lint types ## lint, types, then all tests but the long proofs
	$(BIN)/python -m pytest $(ARGS)

prove: $(READY) ## the long proofs (minutes)
	$(BIN)/python -m pytest -m prove --timeout 1200 $(ARGS)

docs: $(READY) ## build the documentation site into site/; a warning is an error, and no network is needed
	$(BIN)/zensical build --clean --strict

# Runs with an interpreter that already has torch for the GPU, and sets nothing up: GPU machines bring their own.
gpu-check: ## check the figures on a CUDA device; GPU_PYTHON=... chooses the interpreter
	$(or $(GPU_PYTHON),python3) tests/gpu/gpu_check.py

clean: ## remove .venv, caches and build outputs; results stay
	rm -rf $(VENV) build dist site .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
