# Everything sets itself up: a fresh clone needs Python 3.10 or later, and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet
LOCK := $(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.10 --generate-hashes --custom-compile-command 'make lock'
# The real ones, for the tests.
PROGRAMS := .cache/prometheus/bin/prometheus .cache/alertmanager/bin/prometheus-alertmanager

.PHONY: demo test lint suite pythons golden dashboards chart lock test-vllm clean

demo: $(VENV)/.demo-ready  ## Serve a simulated engine's metrics on :9948 and show its headroom.
	@$(BIN)/kvcache-exporter demo

test: lint suite pythons  ## Everything that has to pass.

lint: $(VENV)/.test-ready  ## ruff and mypy --strict.
	$(BIN)/ruff check exporter dashboards helm tests
	$(BIN)/ruff format --check exporter dashboards helm tests
	$(BIN)/mypy

suite: $(VENV)/.test-ready $(PROGRAMS)  ## The test suite on the Python of the virtual environment.
	$(BIN)/python -m pytest

pythons: $(PROGRAMS)  ## The test suite on every other Python from 3.10 to 3.13 that this machine has.
	tests/tools/each-python

golden: $(VENV)/.test-ready  ## Write the golden pages and renders and the metric reference anew, to be read as a diff.
	$(BIN)/python -m pytest tests/test_golden.py tests/test_docs.py tests/chart/test_render.py --update-golden

dashboards: $(VENV)/.test-ready  ## Write the Grafana dashboards anew, from their builders.
	$(BIN)/python -m dashboards.build

chart: $(VENV)/.test-ready  ## Copy rules and boards into the Helm chart, and write the table of its values, from their sources.
	$(BIN)/python helm/build.py

lock: $(VENV)/.test-ready  ## Pin anew, by hash, what the image holds and what builds it; read the diff.
	$(LOCK) --output-file requirements/build.lock requirements/build.in
	$(LOCK) --extra kubelet --extra web --output-file requirements/runtime.lock pyproject.toml

test-vllm: $(VENV)/.test-ready  ## Compare every number with a real vLLM on this machine's CPU (about 4 GB of downloads).
	tests/vllm/run

clean:
	rm -rf .venv .venv-* .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo-ready: pyproject.toml | $(BIN)/pip
	$(PIP) install --editable .
	touch $@

$(VENV)/.test-ready: pyproject.toml | $(BIN)/pip
	$(PIP) install --editable '.[test]'
	touch $@ $(VENV)/.demo-ready

.cache/prometheus/bin/prometheus:
	tests/tools/get-programs .cache/prometheus prometheus prometheus promtool

.cache/alertmanager/bin/prometheus-alertmanager:
	tests/tools/get-alertmanager .cache/alertmanager
