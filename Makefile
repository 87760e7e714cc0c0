# Every target makes the virtual environment it needs. All it takes is Python 3.11 with pip.
#
# A torch without CUDA, which saves gigabytes on a laptop:
#   make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= $(shell for python in python3.11 python3; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& { echo "$$python"; break; }; done)
VENV ?= .venv
PIP_ARGS ?=
PYTEST_ARGS ?= -n 2 --dist loadgroup
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test check format bench proto venv clean

help:  ## show the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(STAMP)  ## cache a real table on two local nodes and train from it with two ranks
	$(BIN)/python examples/demo.py $(ARGS)

test: $(STAMP)  ## run the whole test suite
	$(BIN)/pytest $(PYTEST_ARGS) $(ARGS)

check: $(STAMP)  ## lint, formatting, types, generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python protos/generate.py --check

format: $(STAMP)  ## sort imports and format
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: $(STAMP)  ## measure rows per second on this machine
	$(BIN)/python -m benchmarks.throughput $(ARGS)

proto: $(STAMP)  ## regenerate the code under protos/
	$(BIN)/python protos/generate.py

venv: $(STAMP)  ## make the virtual environment

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found; name one: make PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@

clean:  ## remove the virtual environment and everything built
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
