# Every target first sets up what it needs in .venv, when that is missing or the pins have changed: the demo few
# packages, the others everything.
SHELL := /bin/bash
PYTHON ?= python3.11
VENV := .venv
STAMP := $(VENV)/.pins
DEMO_STAMP := $(VENV)/.demo-pins
PINS := constraints.txt pyproject.toml setup.py src/rlplane/storage/_copy.c scripts/setup.sh
RUN := $(VENV)/bin
# More than there may be cores: much of a test is waiting for processes to start, and for clocks.
WORKERS ?= 3
# slipcover measures branches for a fraction of what tracing costs.
COVERAGE := build/coverage.json
MEASURED := $(RUN)/python -m slipcover --branch --source $(CURDIR)/src/rlplane --json --out $(COVERAGE)
PYTEST := pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder --durations=10

.PHONY: help setup demo test lint docs bench clean
.DEFAULT_GOAL := help

help: ## Show the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(STAMP) ## Make .venv with everything pinned in constraints.txt

$(DEMO_STAMP): $(PINS)
	@PYTHON="$(PYTHON)" VENV="$(VENV)" scripts/setup.sh demo
	@touch $@

$(STAMP): $(PINS)
	@PYTHON="$(PYTHON)" VENV="$(VENV)" scripts/setup.sh test
	@touch $(DEMO_STAMP) $@

demo: $(DEMO_STAMP) ## Run the main job on the embedded engine
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

# The tests start hundreds of processes, each of which would else compile what it imports anew.
test: export PYTHONDONTWRITEBYTECODE :=
test: lint ## Lint, then every test, in WORKERS processes, with the branch coverage of src; ARGS for some of them
	@echo "==> tests"
	@mkdir -p $(dir $(COVERAGE))
	@$(if $(ARGS),$(RUN)/python,$(MEASURED)) -m $(PYTEST) $(ARGS)
	@$(if $(ARGS),,$(RUN)/python scripts/print_coverage.py $(COVERAGE) --at-least 90)

docs: $(STAMP) ## Build the site of the docs into build/site
	@echo "==> docs"
	@NO_MKDOCS_2_WARNING=1 $(RUN)/mkdocs build --strict
	@echo "open build/site/index.html"

bench: $(STAMP) ## Measure us, the peers and the machine's limit side by side
	@echo "==> bench"
	@$(RUN)/rlplane bench $(ARGS)

clean: ## Remove .venv and caches
	@echo "==> removing $(VENV), caches and build output"
	@rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info src/rlplane/storage/*.so
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
