# `make` lists the commands. Each sets up .venv on its own and is quick the second time.

# The first of these that is Python >= 3.10; `make PYTHON=/path/to/python3` chooses another.
CANDIDATES = python3 python3.13 python3.12 python3.11 python3.14 python3.10 python
NEW_ENOUGH = import sys; sys.exit(sys.version_info < (3, 10))
PYTHON ?= $(shell for p in $(CANDIDATES); do $$p -c '$(NEW_ENOUGH)' >/dev/null 2>&1 && { echo $$p; break; }; done)

# What pip is asked for. A CUDA build of torch brings its own Triton; TRITON serves the CPU builds, which bring none.
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0
# Test workers: one a core, at most 8.
JOBS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); [ $$n -gt 8 ] && n=8; echo $$n)
# What is passed on, as in `make demo ARGS="--help"` or `make test ARGS="-k mask"`.
ARGS ?=

BIN = .venv/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check install --quiet

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-gpu lint format bench doctor clean

help:  ## list the commands
	@echo "flashtile: exact attention in pure Python"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1 | \2/p' Makefile | while IFS='|' read -r c d; do printf '%-16s %s\n' "$$c" "$$d"; done

setup: .venv/.ready  ## install everything into .venv

.venv/.ready: pyproject.toml
	@if [ -z "$(PYTHON)" ]; then \
	    echo "flashtile needs Python >= 3.10; none of '$(CANDIDATES)' is. Install one, or: make PYTHON=/path/to/python3" >&2; exit 1; fi
	@$(PYTHON) -c '$(NEW_ENOUGH)' 2>/dev/null || { \
	    echo "flashtile needs Python >= 3.10; $(PYTHON) is $$($(PYTHON) --version 2>&1 || true)" >&2; exit 1; }
	@[ -x $(BIN)/python ] || { echo "== making .venv with $$($(PYTHON) --version)"; $(PYTHON) -m venv .venv; } || { \
	    rm -rf .venv; \
	    echo "$(PYTHON) cannot make a virtual environment: install its venv module (on Debian and Ubuntu: python3-venv)" >&2; exit 1; }
	@if $(BIN)/python -c 'import torch' 2>/dev/null; then quiet=--quiet; \
	    else echo "== installing $(TORCH) (the largest part: minutes on a slow network)"; fi; \
	    $(BIN)/python -m pip --disable-pip-version-check install $$quiet "$(TORCH)"
	@echo "== installing flashtile and its test tools"
	@$(PIP) --editable ".[test]"
	@$(BIN)/python -c 'import triton' 2>/dev/null || { echo "== installing $(TRITON)"; $(PIP) "$(TRITON)"; } || \
	    echo "== no Triton for this system: the CPU path works, the kernels' tests are skipped"
	@touch $@

.venv/.ready-lint: .venv/.ready
	@echo "== installing ruff and pyright"
	@$(PIP) --editable ".[lint]"
	@touch $@

demo: .venv/.ready  ## train a small language model on real text (two minutes), plot its loss, sample from it
	$(BIN)/flashtile demo $(ARGS)

# No GPU is visible to these tests, so they are the same everywhere: the CPU path, and the kernels in Triton's interpreter.
test: .venv/.ready  ## run the tests that need no GPU
	CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(JOBS) $(ARGS)

test-gpu: .venv/.ready  ## run all tests with the GPU
	$(BIN)/python -m pytest $(ARGS)

lint: .venv/.ready-lint  ## ruff and pyright
	@status=0; for check in "ruff check" "ruff format --check" pyright; do \
	    echo "$(BIN)/$$check"; $(BIN)/$$check || status=1; done; exit $$status

format: .venv/.ready-lint  ## rewrite the code as ruff wants it; renew the line numbers in the docs
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/python -m tests.doc_links

bench: .venv/.ready  ## measure attention on this machine
	$(BIN)/flashtile bench flash-attention $(ARGS)

doctor: .venv/.ready  ## say what works on this machine
	$(BIN)/flashtile doctor $(ARGS)

clean:  ## remove .venv and everything the commands wrote
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist runs out src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
