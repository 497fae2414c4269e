PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: help setup test compare lint types

help:
	@echo "make compare   draft in JAX and PyTorch in lockstep on the shipped pair, and time both"
	@echo "make test      run the tests"
	@echo "make lint      ruff"
	@echo "make types     pyright, which needs Node.js or fetches it"
	@echo "make setup     only create $(VENV); the others do it themselves"

setup: $(STAMP)

# torch first and exactly: the version of the constraints file is a CPU build where the index offers one.
$(STAMP): pyproject.toml constraints/cpu-py311.txt
	@echo "setting up $(VENV) with CPU builds of jax and torch (a few minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@$(RUN) -m pip install -q $(PIP_ARGS) -c constraints/cpu-py311.txt "$$(grep '^torch==' constraints/cpu-py311.txt)"
	@$(RUN) -m pip install -q $(PIP_ARGS) -c constraints/cpu-py311.txt -e '.[dev]'
	@touch $@

test: $(STAMP)
	@$(RUN) -m pytest

compare: $(STAMP)
	@$(RUN) -m jax_dflash compare

lint: $(STAMP)
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .

types: $(STAMP)
	@$(RUN) -m pyright --pythonpath $(RUN)
