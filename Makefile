# `make run` compares the paper's algorithms; `make test` checks everything. Both set up .venv/ first.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
unexport PYTHONDONTWRITEBYTECODE  # the tests start many processes, which share their bytecode

.PHONY: run test test-all test-live test-native lint bench bench-peers bench-table bench-mapped bench-client bench-clipping \
        bench-federation real-tables advice-tables attack docs wheel check-wheel clean

run: $(INSTALLED)
	$(BIN)/pfedme compare \
	    pfedme:lam=20,eta=0.01,alpha=0.01,beta=2 fedavg:eta=0.02 per-fedavg:alpha=0.02,eta=0.002 \
	    alone:eta=0.02 fedavg-ft:eta=0.02 \
	    --data synthetic --model mlr --rounds 600 --cohort 10 --personalize auto:small=0 --out runs/first --force

test: lint
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder  # three, since live tests wait most of the time

test-all: lint
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m ''

test-live: $(INSTALLED)
	$(BIN)/pytest -m '' -s tests/test_live.py tests/test_live_long.py tests/test_live_outside.py tests/test_live_relatives.py \
	    tests/test_live_choice.py tests/test_live_privacy.py tests/test_live_region.py

test-native: $(INSTALLED)  # the kernel of the proximal steps, which needs the compiler in a package
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[native]'
	$(BIN)/pytest -n 2 tests/test_native.py tests/test_accelerators.py

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: $(INSTALLED)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python bench/run.py

bench-peers: $(INSTALLED)
	$(BIN)/python bench/peers/run.py

bench-table: $(INSTALLED)
	$(BIN)/python bench/table.py

bench-mapped: $(INSTALLED)  # 40 GB on the disk
	$(BIN)/python bench/mapped.py

bench-client: $(INSTALLED)
	$(BIN)/python bench/client.py

bench-clipping: $(INSTALLED)
	$(BIN)/python bench/clipping.py

bench-federation: $(INSTALLED)
	$(BIN)/python bench/federation.py

bench-deployed: $(INSTALLED)
	$(BIN)/python bench/deployed.py

real-tables: $(INSTALLED)  # docs/results/tables.md is its output
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[tables]'
	$(BIN)/python bench/tables/run.py

advice-tables: $(INSTALLED)  # docs/results/advice.md is its output
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[tables]'
	$(BIN)/python bench/tables/advice.py

attack: $(INSTALLED)  # docs/results/attack.md is its output
	@$(BIN)/python tests/attack.py

docs: $(INSTALLED)  # the site is written to docs/_build/html
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	rm -rf docs/_build
	$(BIN)/sphinx-build -q -n -W --keep-going -b html -d docs/_build/doctrees docs docs/_build/html
	$(BIN)/python docs/_ext/check.py docs/_build/html

wheel: $(INSTALLED)
	rm -rf build dist
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .

check-wheel: wheel
	PYTHON='$(PYTHON)' tests/wheel.sh

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pfedme needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile --no-deps --requirement constraints.txt  # it is complete
	$(BIN)/pip install --quiet --no-deps --editable .
	touch $@

clean:
	rm -rf .venv .venv-peers build dist docs/_build docs/commands src/*.egg-info .pytest_cache .ruff_cache .hypothesis
