PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
ORACLES := .venv-oracles

.PHONY: help setup test compare parity mutate oracles lossless lint types

help:
	@echo "make compare   draft in JAX and PyTorch in lockstep on the shipped pair, and time both"
	@echo "make parity    whether JAX and PyTorch compute the same function, tap by tap, against a float64 oracle"
	@echo "make mutate    plant bugs in both and see that the parity harness finds each"
	@echo "make oracles   the public DFlash packages against ours, in an environment of their own (1.2 GB)"
	@echo "make lossless  every text that of plain greedy decoding, over the whole grid (hours; goes on where it stopped)"
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
	@$(RUN) -m pytest -n 2 --dist loadfile

compare: $(STAMP)
	@$(RUN) -m jax_dflash compare

parity: $(STAMP)
	@$(RUN) -m parity_tests run

mutate: $(STAMP)
	@$(RUN) -m parity_tests mutate

# --no-deps: what constraints/oracles.txt says about these four.
$(ORACLES)/.installed: constraints/oracles.txt
	@echo "setting up $(ORACLES) with the public DFlash packages (1.2 GB, a minute or two)"
	@$(PYTHON) -m venv $(ORACLES)
	@$(ORACLES)/bin/python -m pip install -q $(PIP_ARGS) -c constraints/oracles.txt "$$(grep '^torch==' constraints/oracles.txt)"
	@$(ORACLES)/bin/python -m pip install -q $(PIP_ARGS) -c constraints/oracles.txt transformers numpy pydantic safetensors
	@$(ORACLES)/bin/python -m pip install -q $(PIP_ARGS) -c constraints/oracles.txt --no-deps dflash speculators hs-connectors specforge
	@touch $@

oracles: $(STAMP) $(ORACLES)/.installed
	@$(RUN) -m parity_tests.oracles.agreement --venv $(ORACLES)

lossless: $(STAMP)
	@$(RUN) -m parity_tests.lossless

lint: $(STAMP)
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .

types: $(STAMP)
	@$(RUN) -m pyright --pythonpath $(RUN)
