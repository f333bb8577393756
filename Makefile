# make demo and make test are all a newcomer needs; both install everything into .venv first.
VENV ?= .venv
PYTHON := $(VENV)/bin/python
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test test-slow test-oldest lint format types check release-check clean

$(VENV)/.installed: pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(VENV)/.installed
	$(PYTHON) examples/demo/run.py

test: $(VENV)/.installed
	$(PYTHON) -m pytest -q -n 2 --hypothesis-profile=ci -m 'not slow and not gpu'

# Large, and noisy when it is imported: for one slow test.
$(VENV)/.quantised: $(VENV)/.installed
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -c constraints.txt bitsandbytes
	touch $@

test-slow: $(VENV)/.installed $(VENV)/.quantised
	$(PYTHON) -m pytest -q -n 2 --hypothesis-profile=ci -m 'slow and not gpu'

# The oldest trainers and libraries supported, in a place of their own: what touches transformers, accelerate or lightning.
OLDEST := .venv-oldest
OLDEST_TESTS := tests/callbacks $(addprefix tests/core/test_,audit.py continuations.py encoding.py heads.py injection.py \
  sampling.py scorer.py walk_and_search.py)

$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	python3 -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-oldest.txt \
	  -e '.[hf,lightning,wandb,triton,dp]' datasets hypothesis lightning peft pytest pytest-xdist torchdata
	touch $@

test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest -q -n 2 --hypothesis-profile=ci -m 'not slow and not gpu' $(OLDEST_TESTS)

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
	rm -rf $(VENV) $(OLDEST) build dist demo_output *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
