# Everything a newcomer and the CI need. `make help` lists it.

SHELL := bash
.SHELLFLAGS := -o pipefail -c
VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PORT ?= 30000
POLICY ?= examples/tenants.yaml

.PHONY: help install tools serve lint types unit serving test bench bench-quick clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(STAMP) ## Make .venv with SGLang and this package (11 GB, about 4 minutes)

$(STAMP): pyproject.toml setup.py
	@echo "== installing SGLang and sglang-ext into $(VENV): about 4 minutes, 11 GB"
	test -x $(PYTHON) || python3 -m venv $(VENV)
	$(PYTHON) -m pip install --disable-pip-version-check --progress-bar off -e '.[dev]' \
		| grep --line-buffered -E '^(Collecting|Installing|Successfully)' | cut -c1-160
	touch $@

tools: $(STAMP) ## Install Prometheus, Chromium and Mooncake's libraries for their tests, where apt-get can
	@which promtool chromium chromedriver >/dev/null || { apt-get -q update && apt-get -qy install \
		--no-install-recommends prometheus chromium chromium-driver >/dev/null; } \
		|| echo "== no Prometheus or Chromium: their tests are skipped"
	@$(PYTHON) -c 'import mooncake.store' 2>/dev/null || { apt-get -q update && apt-get -qy install \
		--no-install-recommends libibverbs1 librdmacm1 libnuma1 liburing2 >/dev/null; } \
		|| echo "== Mooncake's client cannot be loaded: its tests are skipped"

serve: $(STAMP) ## Serve the demo model to the tenants of examples/tenants.yaml
	@$(VENV)/bin/sglang-ext demo-model >/dev/null
	@$(PYTHON) examples/curl_lines.py $(POLICY) $(PORT)
	exec $(PYTHON) -m sglang_ext.launch_server --tenant-policy $(POLICY) --host 127.0.0.1 --port $(PORT)

lint: $(STAMP) ## Check style and format
	$(VENV)/bin/ruff check --output-format=concise .
	$(VENV)/bin/ruff format --check .

types: $(STAMP) ## Check types
	$(VENV)/bin/mypy -p sglang_ext

unit: $(STAMP) ## Tests that start no server
	$(PYTHON) -m pytest -m "not serving" --durations 10

serving: $(STAMP) ## Tests against the real server
	$(PYTHON) -m pytest -m serving --durations 10

test: lint types tools ## All checks and all tests
	$(PYTHON) -m pytest --durations 15

bench: $(STAMP) ## The short version of every benchmark, its results and the tables of docs/benchmarks.md
	@command -v fio >/dev/null || echo "== no fio: bench_tiers.py checks no bar (apt-get install fio)"
	$(PYTHON) -m benchmarks.short $(if $(TRACE),--trace $(TRACE)) $(if $(DATA),--data $(DATA))

bench-quick: $(STAMP) ## Every benchmark, under a minute each, results into build/
	@command -v fio >/dev/null || echo "== no fio: bench_tiers.py checks no bar (apt-get install fio)"
	for script in benchmarks/bench_*.py; do \
		$(PYTHON) $$script --quick --json build/$$(basename $$script .py).json || true; done

clean: ## Remove .venv and caches
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
