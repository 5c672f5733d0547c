# `make` lists the targets. All of them work from a fresh clone: what they need is first installed into .venv.

SHELL := bash
.DEFAULT_GOAL := help
.NOTPARALLEL:

VENV ?= .venv
VENV_XLA ?= .venv-xla
VENV_COLAB ?= .venv-colab
VENV_COLAB_NEWER ?= .venv-colab-newer
EXTRAS := pytorch,tensorflow,jax,gpu,lab,test
JOBS ?= 2
FAULTS ?= 50
TIMES ?= 20
LAB_ARGS ?=
PYTEST_ARGS ?=

PY := $(VENV)/bin/python
PY_XLA := $(VENV_XLA)/bin/python
STAMP := $(VENV)/installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# PYTHON, if not given, is the first of these that is Python 3.10 to 3.13 and can make a virtual environment.
PYTHONS := python3 python3.13 python3.12 python3.11 python3.10 python
SUITS := import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))
VERSION := import platform; print(platform.python_version())

# Shell lines: sets `python` to PYTHON or the first that suits, or ends with the reason.
define find-python
python="$(PYTHON)"; \
for name in $(PYTHONS); do \
	if [ -z "$$python" ] && "$$name" -c '$(SUITS)' >/dev/null 2>&1; then python="$$name"; fi; \
done; \
if [ -z "$$python" ]; then \
	echo "accel_nb: no Python 3.10 to 3.13 with its modules venv and ensurepip is among: $(PYTHONS)" >&2; \
	echo "Install one (Debian, Ubuntu: python3 and python3-venv) or name one: make PYTHON=/path/to/python3.12 lab" >&2; \
	exit 1; \
fi
endef

.PHONY: help lab test test-long test-colab test-xla install lint unit browser nbval stamp format notebooks bench clean check-python

help: ## list the targets
	@echo "make TARGET, where TARGET is one of"
	@sed -n 's/^\([a-z-]*\):.*## /\1 /p' $(firstword $(MAKEFILE_LIST)) | while read -r name what; do \
		printf '  %-10s %s\n' "$$name" "$$what"; done
	@echo "Another Python: make PYTHON=python3.12 lab. More options for JupyterLab: make lab LAB_ARGS=\"--port=9999\"."

lab: install ## open JupyterLab on the first notebook
	@echo "accel_nb: JupyterLab on notebooks/01_start.ipynb; Ctrl-C here ends it"
	@root=; if [ "$$(id -u)" = 0 ]; then root=--allow-root; fi; \
	exec $(PY) -m jupyterlab notebooks/01_start.ipynb $$root $(LAB_ARGS)

test: lint unit browser nbval test-colab ## run every check and test
	@echo "accel_nb: all checks and tests passed"

test-long: install ## test for hours: FAULTS (50) lives of runs full of faults, long runs, the notebooks TIMES (20) times
	@echo "accel_nb: $(FAULTS) lives of runs in which all goes wrong, for each framework, single and with ranks"
	@failed=0; \
	ACCEL_NB_FAULTS=$(FAULTS) $(PY) -m pytest tests/test_faults.py -n $(JOBS) $(PYTEST_ARGS) || failed=1; \
	echo "accel_nb: long runs"; \
	$(PY) -m pytest tests -m long -rP --ignore=tests/colab --ignore=tests/xla $(PYTEST_ARGS) || failed=1; \
	echo "accel_nb: the notebooks, $(TIMES) times in a row"; \
	$(PY) tests/notebook_files.py check --times=$(TIMES) || failed=1; \
	exit $$failed

test-colab: ## test with Google Colab's versions: panel, Keras, notebooks (2 x 3 GB in .venv-colab and .venv-colab-newer)
	@VENV_COLAB=$(VENV_COLAB) VENV_COLAB_NEWER=$(VENV_COLAB_NEWER) JOBS=$(JOBS) bash tests/colab/run.sh $(PYTEST_ARGS)

test-xla: check-python ## test PyTorch's TPU program on XLA's CPU runtime (7 GB in .venv-xla, or in VENV_XLA)
	@$(find-python); \
	if ! $(PY_XLA) -c pass 2>/dev/null; then \
		echo "accel_nb: making $(VENV_XLA) with Python $$("$$python" -c '$(VERSION)') ($$python)"; \
		rm -rf $(VENV_XLA); \
		"$$python" -m venv $(VENV_XLA) && echo '*' > $(VENV_XLA)/.gitignore || exit 1; \
	fi
	@echo "accel_nb: installing torch_xla and the PyTorch that it fits into $(VENV_XLA) (minutes, once)"
	@$(PY_XLA) -m pip install -qq -r tests/xla/requirements.txt -e .
	@echo "accel_nb: tests of the torch_xla program"
	@$(PY_XLA) -m pytest tests/xla $(PYTEST_ARGS)

install: $(STAMP) ## install accel_nb and all it is tested with into .venv

$(STAMP): pyproject.toml constraints.txt | check-python
	@$(find-python); \
	if ! $(PY) -c pass 2>/dev/null; then \
		echo "accel_nb: making $(VENV) with Python $$("$$python" -c '$(VERSION)') ($$python)"; \
		rm -rf $(VENV); \
		"$$python" -m venv $(VENV) || exit 1; \
	fi; \
	echo "accel_nb: installing PyTorch, TensorFlow, JupyterLab and the tests' tools into $(VENV) (minutes, once)"; \
	quiet=-qq; if [ -t 1 ]; then quiet=; fi; \
	$(PY) -m pip install $$quiet -c constraints.txt -e '.[$(EXTRAS)]' && touch $(STAMP)

# PYTHON must suit, and an environment that was made with another one would be used in silence.
check-python:
	@[ -n "$(PYTHON)" ] || exit 0; \
	if ! "$(PYTHON)" -c '$(SUITS)'; then \
		echo "accel_nb: PYTHON=$(PYTHON) does not suit: Python 3.10 to 3.13 with its modules venv and ensurepip does" >&2; \
		exit 1; \
	fi; \
	[ -e $(PY) ] || exit 0; \
	have=$$($(PY) -c '$(VERSION)'); want=$$("$(PYTHON)" -c '$(VERSION)'); \
	if [ "$$have" != "$$want" ]; then \
		echo "accel_nb: $(VENV) was made with Python $$have, PYTHON=$(PYTHON) is $$want. Run: make clean" >&2; \
		exit 1; \
	fi

lint: install ## check style and types (ruff, mypy) and the notebooks' form
	@echo "accel_nb: ruff, mypy, form of the notebooks"
	@failed=0; \
	$(PY) -m ruff check . || failed=1; \
	$(PY) -m ruff format --check . || failed=1; \
	$(PY) -m mypy || failed=1; \
	$(PY) tests/notebook_files.py lint || failed=1; \
	exit $$failed

unit: install ## run the tests of the package, JOBS at a time
	@echo "accel_nb: tests of the package, $(JOBS) at a time"
	@$(PY) -m pytest tests --ignore=tests/browser --ignore=tests/colab --ignore=tests/xla -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

browser: install ## run the tests in a real browser (skipped where no Chromium is found)
	@echo "accel_nb: tests in Chromium on JupyterLab"
	@$(PY) -m pytest tests/browser $(PYTEST_ARGS)

nbval: install ## run the notebooks and compare what they print with what is stored
	@echo "accel_nb: the notebooks, run and compared by nbval"
	@$(PY) tests/notebook_files.py check $(PYTEST_ARGS)

stamp: install ## write the project's address, from pyproject.toml, into the notebooks
	@$(PY) tests/notebook_files.py stamp

format: install ## put code and notebooks into their form
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

notebooks: install ## run the notebooks and store the outputs that nbval compares
	@$(PY) tests/notebook_files.py refresh

bench: install ## run the benchmarks, one after the other
	@for script in benchmarks/*.py; do echo "accel_nb: $$script"; $(PY) "$$script" || exit 1; done

clean: ## remove what make made; runs and notebooks stay
	rm -rf $(VENV) .venv-xla .venv-colab .venv-colab-newer build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
