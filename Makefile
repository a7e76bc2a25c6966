# Every target sets up all it needs: a virtual environment in $(VENV) with the
# extras of pyproject.toml. An install is repeated only when pyproject.toml changes.
#
#   PYTHON  interpreter to build the environment with (CPython 3.11 or newer)
#   VENV    where the environment lives
#   ARGS    extra arguments for the command that a target runs

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
# Which tests run, where a target does not say it: those of pyproject.toml.
MARKS :=

# An interpreter the caller names is used or refused; the default may be replaced
# by a newer one, since `python3` is too old on some systems.
ifeq ($(origin PYTHON),file)
CANDIDATES := $(PYTHON) python3.14 python3.13 python3.12 python3.11
else
CANDIDATES := $(PYTHON)
endif

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint format types docs bench clean
# Two installs into one environment at the same time would corrupt it.
.NOTPARALLEL:

help:
	@echo "make demo      run examples.start.quickstart"
	@echo "make test      run the tests (ARGS=\"-k pattern\" is passed to pytest)"
	@echo "make test-all  run also tests that take more than two seconds each"
	@echo "make lint      check style and formatting with ruff"
	@echo "make format    apply ruff's fixes and formatting"
	@echo "make types     check types with mypy"
	@echo "make docs      build the documentation into docs/_build/html"
	@echo "make bench     measure speed and scale, of a GPU if JAX finds one: into benchmark_results"
	@echo "make clean     remove the environment and everything built"

demo: $(VENV)/.stamp-examples
	$(BIN)/python -m examples.start.quickstart $(ARGS)

# Bytecode of what is imported is kept, in the environment, whatever the caller's settings: both
# processes of a run, and those that tests start, would else compile every module themselves.
test-all: MARKS := -m "not slow"
test test-all: $(VENV)/.stamp-test
	PYTHONDONTWRITEBYTECODE= PYTHONPYCACHEPREFIX="$(abspath $(VENV))/bytecode" \
		$(BIN)/python -m pytest -n 2 --dist loadfile $(MARKS) $(ARGS)

lint: $(VENV)/.stamp-test
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

format: $(VENV)/.stamp-test
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

types: $(VENV)/.stamp-test
	$(BIN)/python -m mypy $(ARGS)

docs: $(VENV)/.stamp-docs
	$(BIN)/python -m sphinx -W --keep-going -n -b html -d docs/_build/doctrees docs docs/_build/html

bench: $(VENV)/.stamp-examples
	$(BIN)/python -m benchmarks.speed.performance $(ARGS)

# pyvenv.cfg guards against removing a folder that VENV names by mistake.
clean:
	@if [ -f "$(VENV)/pyvenv.cfg" ]; then rm -rf "$(VENV)"; fi
	rm -rf build dist benchmark_results docs/_build .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	find numpyro_kscore tests examples benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# A candidate is run, not only looked up: version managers put names on PATH
# that fail when called.
$(VENV)/.stamp-venv:
	@found=; \
	for candidate in $(CANDIDATES); do \
		if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
			if "$$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then found="$$candidate"; break; fi; \
			echo "skipped $$candidate: it lacks the standard modules venv and ensurepip (on Debian: the package python3-venv)" >&2; \
		fi; \
	done; \
	if [ -z "$$found" ]; then \
		echo "error: expected CPython 3.11 or newer; got none among: $(CANDIDATES)" >&2; \
		echo "       install one, or name it: make PYTHON=/path/to/python3.11" >&2; \
		exit 1; \
	fi; \
	echo "creating $(VENV) with $$("$$found" --version) ($$found)"; \
	"$$found" -m venv "$(VENV)"
	@touch "$@"

# Not byte-compiled: Python does that at the first import, and most modules are never imported.
$(VENV)/.stamp-%: pyproject.toml $(VENV)/.stamp-venv
	@echo "installing numpyro-kscore[$*] into $(VENV) (takes a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable ".[$*]"
	@touch "$@"
