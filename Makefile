# Everything runs in a virtual environment of its own: nothing but Python is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
TOOLS := $(VENV)/tools
FUZZING := $(VENV)/fuzzing
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable

SITE := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.PHONY: demo serve test nightly check docs coverage format bench reproduce figures fuzz clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[places,serve]'
	touch $(READY)

$(TOOLS): $(READY)
	$(INSTALL) '.[places,dev,docs]'
	touch $(TOOLS)

$(FUZZING): $(TOOLS)
	$(INSTALL) '.[places,dev,docs,fuzz]'
	touch $(FUZZING)

demo: $(READY)  ## train SNM and S2M on places, compare them, write the report
	$(BIN)/evenhand demo
	@echo 'or: make serve'

serve: $(READY)  ## the two runs of the demo as a page in a browser; trains them first if they are missing
	test -f runs/demo/report.html || $(BIN)/evenhand demo
	$(BIN)/evenhand serve runs/demo/s2m runs/demo/snm

test: $(TOOLS)  ## every test, each file by one of a few processes
	$(BIN)/pytest --numprocesses auto --maxprocesses 8 --dist loadfile

nightly: $(FUZZING)  ## mutants, the long tests, fuzzing, killed runs: about an hour
	$(BIN)/python -m tests.nightly

check: $(TOOLS)  ## format, lint, strict types, a site without warnings that loads nothing from elsewhere
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(SITE)
	! grep --recursive --extended-regexp '<(script|img|iframe)[^>]* src="?http|<link[^>]* href="?http' site

docs: $(TOOLS)  ## the docs as a site; to read it with its search: python -m http.server --directory site
	$(BIN)/python -m docs.settings
	$(BIN)/python -m docs.commands
	$(SITE)

CORE := */losses.py,*/mining.py,*/sampling.py,*/risk.py,*/objective.py,*/metrics.py,*/kernels/*
# Lines of compiled functions count when numba compiles them, so its cache must be empty.
coverage: $(TOOLS)  ## lines of the core that the tests run, at least 95 %
	NUMBA_JIT_COVERAGE=1 NUMBA_CACHE_DIR=$$(mktemp -d) $(BIN)/pytest --quiet --cov=evenhand --cov-report=
	$(BIN)/coverage report --include='$(CORE)' --show-missing --fail-under=95

fuzz: $(FUZZING)  ## MINUTES of damaged inputs for every parser; findings in fuzzing/
	$(BIN)/python -m tests.fuzz --minutes $(or $(MINUTES),10) --processes $(or $(PROCESSES),2)

format: $(TOOLS)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)  ## time and memory of a step beside the other ways to write it
	$(BIN)/python benchmarks/cpu.py

reproduce: $(READY)  ## the paper's tables, hours on a GPU; QUICK=1: generated data, in seconds
ifdef QUICK
	$(BIN)/python -m experiments.reproduce --quick
else
	$(BIN)/python -m experiments.image_data mnist cifar10
	$(BIN)/python -m experiments.reproduce table2-mnist --data downloads
	$(BIN)/python -m experiments.reproduce table2-mnist-odd --data downloads
	$(BIN)/python -m experiments.reproduce table2-cifar10 --steps 24000 --set row.stem=small --data downloads
	$(BIN)/python -m experiments.reproduce table3 --data places
endif

figures: $(TOOLS)  ## the pictures of docs/, drawn anew
	$(BIN)/python benchmarks/figures.py

clean:
	rm -rf $(VENV) build dist site
