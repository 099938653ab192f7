# make demo: train a transformer on eight CPU workers. make test: the tests. make check: format, lint, types, imports, sizes.
# make test-long: the tests that repeat others on more workers. make test-gpu: those that need a GPU; the others do not see it.
# make site: the documentation as a site, in site/.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-long test-gpu tiny check docs site format bench clean

demo: .venv/stamp
	$(BIN)/python examples/tuning_demo/train_simple.py --check

# hundreds of processes import gt: they shall find it compiled
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest

test: .venv/stamp
	$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder

test-long: .venv/stamp
	$(PYTEST) -n 2 --dist load -m long

test-gpu: .venv/stamp
	$(PYTEST) -n 4 -m gpu

tiny: .venv/stamp
	$(BIN)/python -m pytest tests/test_tiny.py

check: .venv/stamp
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/sizes.py

docs: .venv/stamp
	$(BIN)/python -m tools.docs

# the documentation as a site, in site/index.html; warnings are errors
site: .venv-site/stamp
	.venv-site/bin/python -m tools.site
	.venv-site/bin/zensical build --strict --clean

bench: .venv/stamp
	$(BIN)/python benchmarks/bench_dispatch.py

format: .venv/stamp
	$(BIN)/ruff check --fix .

.venv/stamp: requirements.txt pyproject.toml setup.py
	@$(PYTHON) -c "import sys; sys.exit('GT needs Python 3.10 or later' if sys.version_info < (3, 10) else 0)"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing torch and the rest into .venv: 200 MB, or 3 GB with CUDA"
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --config-settings editable_mode=compat -e .
	$(BIN)/python -m compileall -q gt
	touch $@

.venv-site/stamp: pyproject.toml
	test -x .venv-site/bin/python || $(PYTHON) -m venv .venv-site
	.venv-site/bin/python -m pip install --disable-pip-version-check $$(sed -n 's/^docs = \[\(.*\)\].*/\1/p' pyproject.toml | tr -d '",')
	touch $@

clean:
	rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache *.egg-info build dist site
