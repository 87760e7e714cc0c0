# Each target makes the environments that it needs. You need Python 3.11 with pip. One environment is
# shared: a target adds the extra of pyproject.toml with its name.
#
# A torch without CUDA, which saves gigabytes on a laptop:
#   make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= $(shell for python in python3.11 python3; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& { echo "$$python"; break; }; done)
VENV ?= .venv
PIP_ARGS ?=
# A file is run by one process, which starts its clusters once; long files of integration tests
# first, as they are collected, and short ones of unit tests last.
PYTEST_ARGS ?= -n 2 --dist loadfile --no-loadscope-reorder
ARGS ?=

BIN := $(VENV)/bin
# What lies there for each extra that is installed.
WITH := $(VENV)/.with-
EXTRAS := demo test frameworks docs check bench
# Tests start many processes at once, with deadlines: each must find the byte code of its packages.
COMPILED := test frameworks bench dev
# What else is there with an extra, as pyproject.toml has it: pip takes 20 s to find that out.
AND_check := demo
AND_test := demo
AND_frameworks := demo test
AND_bench := demo test
AND_dev := $(EXTRAS)
# Beside the first one, with pins that never meet its own.
PROTO := $(VENV)-proto
PROTO_STAMP := $(PROTO)/.installed
FLOOR := $(VENV)-floor
FLOOR_STAMP := $(FLOOR)/.installed
PEERS ?= .venv-peers
PEERS_STAMP := $(PEERS)/.installed

# Without byte code, every process of a test compiles this project again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-frameworks floor e2e soak soak-writes soak-leader fuzz audits soak-queries soak-epochs soak-draws soak-texts damage writers large \
	check format docs images bench bench-quick proto venv clean

help:  ## show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(WITH)demo  ## cache a real table on two local nodes and train from it with two ranks
	$(BIN)/python examples/demo.py $(ARGS)

test: $(WITH)test  ## run the test suite, without the tests of training frameworks
	$(BIN)/pytest -m "not frameworks and not checkers" $(PYTEST_ARGS) $(ARGS)

test-frameworks: $(WITH)frameworks  ## test inside Accelerate, Transformers, Lightning, DeepSpeed, Ray, Spark, JAX and XGBoost
	$(BIN)/pytest -m frameworks $(PYTEST_ARGS) $(ARGS) $$(grep -lr pytest.mark.frameworks tests --include='test_*.py')

floor: $(WITH)demo $(FLOOR_STAMP)  ## test the client with the lowest versions that pyproject.toml allows
	SERVER_PYTHON=$(abspath $(BIN)/python) $(FLOOR)/bin/pytest -m "not unversioned" $(PYTEST_ARGS) $(ARGS) \
		tests/floor tests/unit/client tests/unit/protocol

e2e: $(WITH)frameworks  ## run TrainJobs on a cluster: KUBECONFIG=FILE or E2E_CONTROL_PLANE=DIR
	E2E_KUBECONFIG="$(KUBECONFIG)" $(BIN)/pytest tests/e2e $(if $(E2E_CONTROL_PLANE),-n 2 --dist loadfile) $(ARGS)

soak: $(WITH)test  ## check every row while nodes die, freeze, rot and lie; 2 minutes, ARGS="--seed 1"
	$(BIN)/python -m benchmarks.trials.soak $(ARGS)

soak-writes: $(WITH)test  ## write tables while 200 writers, nodes and coordinators are killed; ARGS="--seconds 60"
	$(BIN)/python -m benchmarks.trials.write_soak $(ARGS)

soak-leader: $(WITH)frameworks  ## take coordinators away, as root; an hour, ARGS="--control-plane DIR --rounds 11"
	$(BIN)/python -m benchmarks.trials.leader_soak $(ARGS)

soak-forgets: $(WITH)test  ## forget rows while nodes are killed, and look for them everywhere; ARGS="--runs 20"
	$(BIN)/python -m benchmarks.trials.forgets $(ARGS)

fuzz: $(WITH)test  ## send a million malformed calls to a node with tokens; 20 minutes, ARGS="--calls 20000 --seed 1"
	$(BIN)/python -m benchmarks.trials.fuzz $(ARGS)

audits: $(WITH)test  ## check the verdicts of 2,000 made-up epochs, most with a fault; a minute, ARGS="--seed 2000"
	$(BIN)/python -m benchmarks.trials.audits $(ARGS)

soak-epochs: $(WITH)test  ## amend, erase, kill and resume 1,000 made-up jobs; 10 minutes, ARGS="--seed 1000"
	$(BIN)/python -m benchmarks.trials.epochs $(ARGS)

soak-queries: $(WITH)test  ## compare 30,000 generated queries and columns with other engines; 15 minutes, ARGS="--seed 1"
	$(BIN)/python -m benchmarks.trials.differential $(ARGS)

soak-draws: $(WITH)test  ## compare draws and shuffles of 10,000 epochs with theory; 2 minutes, ARGS="--seed 1"
	$(BIN)/python -m benchmarks.trials.draws $(ARGS)

damage: $(WITH)test  ## load 20,000 damaged files: no process ends, each is named; ARGS="--seed 1"
	$(BIN)/python -m benchmarks.trials.damaged_files $(ARGS)

writers: $(WITH)test  ## compare 200 tables of eight writers with DuckDB; ARGS="--seed 1"
	$(BIN)/python -m benchmarks.trials.writers $(ARGS)

large: $(WITH)test  ## load and read columns of more than 2 GiB; 10 minutes, 8 GB of memory
	$(BIN)/python -m benchmarks.trials.large_columns $(ARGS)

soak-texts: $(WITH)test  ## load 20,000 damaged files of JSON and CSV; 5 minutes, ARGS="--seed 20000"
	$(BIN)/python -m benchmarks.trials.text_fuzz $(ARGS)

check: $(WITH)check $(PROTO_STAMP)  ## lint, formatting, types, generated code, the chart
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/pytest -q -m checkers -n 0 tests/unit/project/test_editable_install.py
	$(PROTO)/bin/python protos/generate.py --check
	$(BIN)/helm lint --quiet --strict runtimes/chart

format: $(WITH)check  ## sort imports and format
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

docs: $(WITH)docs  ## build the site in build/site; a broken link fails it
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

images:  ## build the images and try them out, with docker, podman or buildah; ARGS="server"
	$(PYTHON) runtimes/images/build_images.py $(ARGS)

bench: $(WITH)bench $(PEERS_STAMP)  ## measure everything, beside other libraries, and plot it; 40 minutes
	for name in shuffle load resume mixture; do \
		$(BIN)/python -m benchmarks.$$name --peers-python $(PEERS)/bin/python || exit 1; done
	for name in throughput stores size ranks scale views amend tokens wire tracing lakes access writes refresh \
		accelerators coordinator simulation; do \
		$(BIN)/python -m benchmarks.$$name || exit 1; done
	$(PEERS)/bin/python benchmarks/plot.py

bench-quick: $(WITH)bench  ## the same on few rows, without other libraries; 4 minutes
	for name in shuffle load resume mixture throughput stores size ranks scale views amend tokens wire tracing lakes access writes \
		refresh accelerators coordinator simulation; do \
		$(BIN)/python -m benchmarks.$$name --quick || exit 1; done

proto: $(PROTO_STAMP)  ## regenerate the code under protos/
	$(PROTO)/bin/python protos/generate.py

venv: $(WITH)dev  ## make the environment of all targets at once

$(PROTO_STAMP): protos/requirements.txt
	$(PYTHON) -m venv $(PROTO)
	$(PROTO)/bin/python -m pip install $(PIP_ARGS) --only-binary :all: -r $<
	@touch $@

$(FLOOR_STAMP): tests/floor/requirements.txt pyproject.toml
	$(PYTHON) -m venv $(FLOOR)
	$(FLOOR)/bin/python -m pip install $(PIP_ARGS) --only-binary :all: -r $<
	$(FLOOR)/bin/python -m pip install --no-deps -e .
	$(FLOOR)/bin/python -m pip check
	@touch $@

# What is measured beside this project.
$(PEERS_STAMP): benchmarks/peers/requirements.txt constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install $(PIP_ARGS) -c constraints.txt torch
	$(PEERS)/bin/python -m pip install --no-deps -r benchmarks/peers/requirements.txt
	@touch $@

$(WITH)%: pyproject.toml constraints.txt | $(VENV)/pyvenv.cfg
	$(BIN)/python -m pip install $(PIP_ARGS) --no-compile -c constraints.txt -e '.[$*]'
	@# On all cores; pip uses one. Some packages have files that are no Python 3.
	$(if $(filter $*,$(COMPILED)),-@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib)
	@touch $@ $(addprefix $(WITH),$(AND_$*))

$(VENV)/pyvenv.cfg:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found; name one: make PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

clean:  ## remove the virtual environments and everything built
	rm -rf $(VENV) $(PROTO) $(FLOOR) $(PEERS) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
