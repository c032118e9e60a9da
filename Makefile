# Two commands for users: `make demo` (train a small network, draw its attention) and `make test`.
PYTHON ?= python3
VENV   ?= .venv
RUN    := $(VENV)/bin/python
READY  := $(VENV)/.ready

.PHONY: demo test lint wheel clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip uv
	VIRTUAL_ENV=$(VENV) $(VENV)/bin/uv pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

test: $(READY)
	$(RUN) -m pytest tests

lint: $(READY)
	$(RUN) -m ruff check .

wheel: $(READY)
	$(RUN) -m build --wheel

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis
