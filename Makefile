# make demo and make test are all a newcomer needs; both install everything into .venv first.
VENV ?= .venv
PYTHON := $(VENV)/bin/python
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test test-slow lint format types check release-check clean

$(VENV)/.installed: pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(VENV)/.installed
	$(PYTHON) examples/demo/run.py

test: $(VENV)/.installed
	$(PYTHON) -m pytest -q -n 2 --hypothesis-profile=ci -m 'not slow and not gpu'

test-slow: $(VENV)/.installed
	$(PYTHON) -m pytest -q -n 2 --hypothesis-profile=ci -m 'slow and not gpu'

lint: $(VENV)/.installed
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

format: $(VENV)/.installed
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

types: $(VENV)/.installed
	PATH="$(abspath $(VENV))/bin:$$PATH" scripts/typecheck

check: format lint types test

release-check: $(VENV)/.installed
	PATH="$(abspath $(VENV))/bin:$$PATH" scripts/release-check

clean:
	rm -rf $(VENV) build dist demo_output *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
