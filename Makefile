# make setup   a virtual environment in .venv with everything; quick when nothing changed
# make demo    set-up, then the main job on the built-in model, over HTTP
# make test    set-up, then the tests
# make lint    ruff, mypy --strict and the floors of the house
# make install the service: package, units, configuration (docs/operations.md); make uninstall
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.set-up

.PHONY: setup demo test lint clean

setup: $(STAMP)

# llama-cpp-python compiles llama.cpp here, which takes five to ten minutes the first time.
$(STAMP): pyproject.toml .ci/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "expertd needs Python 3.11 to 3.13; name one: make setup PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "Python's venv module is missing; install it: apt-get install python3-venv" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV); llama.cpp is compiled the first time (five to ten minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: setup
	@$(BIN)/expertd demo

test: setup
	@$(BIN)/python -m pytest

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build

include config/install.mk
