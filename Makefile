# Every target sets up .venv first when it is missing or when the pins have changed.
SHELL := /bin/bash
PYTHON ?= python3.11
VENV := .venv
STAMP := $(VENV)/.pins
RUN := $(VENV)/bin
# More than there may be cores: much of a test is waiting for processes to start, and for clocks.
WORKERS ?= 3

.PHONY: help setup demo test lint bench clean
.DEFAULT_GOAL := help

help: ## Show the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(STAMP) ## Make .venv with everything pinned in constraints.txt

$(STAMP): constraints.txt pyproject.toml setup.py src/rlplane/adapters/local/_copy.c scripts/setup.sh
	@PYTHON="$(PYTHON)" VENV="$(VENV)" scripts/setup.sh
	@touch $@

demo: $(STAMP) ## Run the main job on the embedded engine
	@echo "==> demo"
	@$(RUN)/rlplane demo $(ARGS)

lint: $(STAMP) ## ruff, mypy --strict, import contracts
	@echo "==> ruff"
	@$(RUN)/ruff check .
	@$(RUN)/ruff format --check .
	@echo "==> mypy --strict"
	@$(RUN)/mypy
	@echo "==> import contracts"
	@$(RUN)/lint-imports --no-cache

test: lint ## Lint, then every test, in WORKERS processes
	@echo "==> tests"
	@$(RUN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder $(ARGS)

bench: $(STAMP) ## Measure us, the peers and the machine's limit side by side
	@echo "==> bench"
	@$(RUN)/rlplane bench $(ARGS)

clean: ## Remove .venv and caches
	@echo "==> removing $(VENV), caches and build output"
	@rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info src/rlplane/adapters/local/*.so
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
