# make demo  the main job in minutes, offline: corpus, training, scores, pictures, a folder for the Hub
# make test  the test suite
# Both set up what they need in .venv; all that they ask for is Python 3.11 or newer.

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= .ci/constraints.txt
BIN := $(VENV)/bin

.PHONY: demo test test-oldest slow benchmark lint format clean

demo: $(VENV)/installed
	$(BIN)/python scripts/demo.py

test: $(VENV)/installed
	$(BIN)/python -m pytest

# the same with the oldest transformers that pyproject.toml allows
test-oldest:
	$(MAKE) test VENV=.venv-oldest CONSTRAINTS=.ci/constraints-oldest.txt

slow: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --editable ".[torchao]"
	$(BIN)/python -m pytest -m slow

# speed, memory and scaling, for hours and with nothing else running: make benchmark DATA=... MODEL=... MARIAN=...
benchmark: $(VENV)/installed
	$(BIN)/python scripts/benchmark.py --dataset_name "$(DATA)" --model "$(MODEL)" --marian "$(MARIAN)"
	$(BIN)/python scripts/scaling.py
	$(BIN)/python scripts/results_table.py

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Python 3.11 or newer is needed: make PYTHON=...')"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv .venv-oldest build dist .pytest_cache .ruff_cache
