# Everything from a bare clone with Python 3.11, make and a C++ compiler. `make help` lists the targets.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
CONSTRAINTS := -c constraints/cpu.txt -c constraints/tools.txt
# Stamps: an environment is made again only when what it is made from changes.
RUN := $(VENV)/.stamp-run
DEV := $(VENV)/.stamp-dev
CHART := $(VENV)/.stamp-chart
INPUTS := pyproject.toml constraints/cpu.txt constraints/tools.txt

.DEFAULT_GOAL := help
.PHONY: help demo up test test-all chart-test chart soak lint format proto wheel clean

help: ## Lists the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(RUN) ## Asks the demo model one question through both pools and stops everything
	@$(BIN)/twinpool demo $(ARGS)

up: $(RUN) ## Starts a deployment with the demo model; Ctrl-C stops it (ARGS="--model FOLDER" and so on)
	@$(BIN)/twinpool up $(ARGS)

test: $(DEV) lint ## Lint, types, proto freshness and the tests that need no GPU and are not slow
	$(BIN)/pytest tests -m "not slow and not gpu and not chart" $(ARGS)

chart-test: $(CHART) ## Lints, renders and boots the Helm chart; brings the tools that this takes
	$(BIN)/pytest tests/chart -m "not slow" $(ARGS)

test-all: $(CHART) lint ## Like test, with the slow tests and, on a GPU, those for it
	$(BIN)/pytest tests $(ARGS)

soak: $(DEV) ## Kills and stops workers under load for SOAK_MINUTES (20) and checks every answer
	$(BIN)/python -P scripts/soak

bench-peers: $(DEV) ## Compares with vLLM on this machine (PEER_VLLM: a program that sets it up and runs it)
	PEER_VLLM=$${PEER_VLLM-$(wildcard ../shared/tools/peer-vllm)} $(BIN)/python -P scripts/bench_peers

bench-faults: $(DEV) ## Shows what streams notice when the worker under them dies, hangs or drains
	$(BIN)/python -P scripts/bench_faults

lint: $(DEV) ## Lint, types and proto freshness
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYTHON=$(abspath $(BIN))/python scripts/typecheck
	PYTHON=$(abspath $(BIN))/python scripts/check_proto
	$(BIN)/python -P scripts/gen_chart --check

format: $(DEV) ## Formats the code and repairs what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(DEV) ## Generates the Python code of proto/*.proto
	PYTHON=$(abspath $(BIN))/python scripts/gen_proto

chart: $(CHART) ## Writes the chart's schema, its table of values and the examples' output
	$(BIN)/python -P scripts/gen_chart --examples

wheel: $(DEV) ## Builds the wheel into dist/
	$(BIN)/python -m build --wheel

clean: ## Removes the environment and everything that was built
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUN): $(INPUTS)
	@test -x "$(PYTHON)" || { echo "error: no Python 3.11 found; install it or give one (make PYTHON=/path/to/python3.11)"; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than Python 3.11; give a newer one (make PYTHON=/path/to/python3.11)"; exit 1; }
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) -e '.[worker,nixl]'
	@touch $@

$(DEV): $(RUN)
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) -e '.[worker,nixl,ray,dev]'
	@touch $@

$(CHART): $(DEV) scripts/chart_tools
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) -e '.[worker,nixl,dev,chart]'
	PYTHON=$(abspath $(BIN))/python scripts/chart_tools
	@touch $@
