# The commands of this repository. Each works on a fresh clone: what it needs, it makes first.
PYTHON ?= python3
MODEL  ?= smollm2-135m-instruct

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
OURS   := quire services kernels benchmarks protos examples tests

MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.PHONY: help venv model demo test check protos bench clean \
        check-lint check-types check-imports check-protos check-stubs check-compose

help: ## what can be made
	@echo "make TARGET [PYTHON=python3.12]"
	@sed -n 's/^\([a-z]*\):.*## /\1|/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do \
	  printf '  %-8s %s\n' "$$name" "$$text"; done

venv: $(STAMP) ## a virtual environment in .venv with everything installed, by constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=...")'
	@echo "installing into $(VENV) (some minutes on a new machine)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

model: $(STAMP) ## the demo model, into QUIRE_HOME (default ~/.cache/quire)
	@$(BIN)/quire model pull $(MODEL)

demo: model ## all services up, one streamed answer, down again
	@$(BIN)/quire demo

test: model ## all tests; with ARGS="-k name" those, in one process
ifdef ARGS
	@$(BIN)/python -m pytest $(ARGS)
else
	@$(BIN)/python -m pytest -n auto --dist loadfile -m "not system"; first=$$?; \
	  echo "now those that start services"; $(BIN)/python -m pytest -m system && exit $$first
endif

check: check-lint check-types check-imports check-protos check-stubs check-compose ## lint, types, import rules, protos, compose

check-lint: $(STAMP)
	@echo "ruff: format and lint"
	@$(BIN)/ruff format -q --check $(OURS)
	@$(BIN)/ruff check -q $(OURS)

check-types: $(STAMP)
	@echo "mypy: strict types"
	@$(BIN)/mypy --no-error-summary

check-imports: $(STAMP)
	@echo "import-linter: who may import whom"
	@out=$$($(BIN)/lint-imports --no-logo 2>&1) || { echo "$$out"; exit 1; }

check-protos: $(STAMP)
	@echo "buf: protos are clean and break nothing that has landed"
	@$(BIN)/python protos/check.py

check-stubs: $(STAMP)
	@echo "protos: stubs are fresh, everything has a comment"
	@out=$$($(BIN)/python -m pytest -q tests/protos 2>&1) || { echo "$$out"; exit 1; }

check-compose: $(STAMP)
	@echo "compose files: schema"
	@$(BIN)/check-jsonschema -q --builtin-schema vendor.compose-spec compose*.yaml

protos: $(STAMP) ## quire/v1 from protos/, and their baseline if nothing breaks
	@$(BIN)/python protos/generate.py
	@$(BIN)/python protos/check.py --accept

bench: model ## one load run against a local set; ARGS="--help" for the choices
	@$(BIN)/quire bench serve --local $(ARGS)

clean: ## removes .venv and all caches; models stay
	@rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
	@rm -rf examples/typescript/node_modules examples/typescript/build examples/typescript/src/generated
	@find $(OURS) -name __pycache__ -type d -prune -exec rm -rf {} +
