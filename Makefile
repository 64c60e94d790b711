# make demo  the main job in minutes, offline: corpus, training, scores, pictures, a folder for the Hub
# make test  the test suite
# Both set up what they need in .venv; all that they ask for is Python 3.11 or newer.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test slow lint format clean

demo: .venv/installed
	$(BIN)/python scripts/demo.py

test: .venv/installed
	$(BIN)/python -m pytest

slow: .venv/installed
	$(BIN)/python -m pytest -m slow

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/installed: pyproject.toml .ci/constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Python 3.11 or newer is needed: make PYTHON=...')"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint .ci/constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv build dist runs .pytest_cache .ruff_cache
