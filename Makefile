# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Each sets up .venv by itself, with the exact versions of constraints.txt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Most tests wait for processes half of the time, so that three at once fill two processors. Those that measure a network
# run by themselves afterwards; tests/conftest.py sees to it that they are where they are looked for.
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest -q
TOGETHER := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
ALONE := tests/network

# Where the environment forbids bytecode, each of the hundreds of processes would compile every module again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo docs test test-part test-all check format bench gpu pictures clean

demo: $(READY)
	$(BIN)/penstock demo

# build/docs/index.html opens in a browser, from disk. tests/documents/test_site.py builds it the same way.
docs: $(READY)
	$(BIN)/python -m sphinx -W --keep-going -n -q -b html docs build/docs
	@echo "open build/docs/index.html"

test: $(READY)
	$(PYTEST) -m "not long and not alone" $(TOGETHER)
	$(PYTEST) -m "not long and alone" $(ALONE)

# The long tests whose turn it is: see tests/scaffolding/rotation.py. Of those that run alone, a minute, it always is.
test-part: $(READY)
	$(BIN)/python tests/scaffolding/rotation.py $(TOGETHER)
	$(PYTEST) -m "long and alone" $(ALONE)

test-all: $(READY)
	$(PYTEST) -m "not alone" $(TOGETHER)
	$(PYTEST) -m "alone" $(ALONE)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python benchmarks/runtime/bench.py
	$(BIN)/python benchmarks/overhead/bench.py

# What README shows. The report is of a run that this makes: it wants chromium and two idle processors for a minute.
pictures: $(READY)
	$(BIN)/python docs/pictures/schedules.py
	$(BIN)/python docs/pictures/report.py

# With the Python that is given, its torch and transformers, since .venv has a torch for CPUs; installs nothing.
# A run takes less than eight minutes. `make gpu` runs what no GPU has shown yet, the most telling first; `make gpu PART=2`
# a part; GPU has further options, such as GPU=--missing, which goes on.
gpu:
	$(PYTHON) benchmarks/gpu/run.py $(if $(PART),--part $(PART)) $(GPU)

clean:
	rm -rf $(VENV) build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "penstock needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,check]'
	@touch $@
