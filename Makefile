# Everything is installed into .venv in this checkout; it needs only Python 3.11 and make.
# Another interpreter: make PYTHON=/path/to/python3.11 test

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= demo-out

# -c: the versions that the suite was run with. The variable also pins what builds the package.
INSTALL := PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet \
	--disable-pip-version-check -c constraints.txt

# Unset, because otherwise each process that a test starts would compile all its imports.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-long test-newest lint format types docs bench bench-smoke package release clean

help:
	@echo 'make demo    four ranks train and evaluate on real data; results in $(OUT)/'
	@echo 'make test    the tests that show within minutes whether a change broke something'
	@echo 'make test-long   the rest: every fault, the soak, hosts, examples, the package'
	@echo 'make test-newest   what versions other than those in constraints.txt may break'
	@echo 'make lint    ruff, codespell, prose      make format   let ruff fix what it can'
	@echo 'make types   mypy and pyright, strict    make docs     build the site into site/'
	@echo 'make bench   measure everything and write docs/benchmarks.md and targets.md; takes long'
	@echo 'make bench-smoke check within a minute that the benchmarks run'
	@echo 'make package build dist/, and try it in an empty environment; test-long includes it'
	@echo 'make release the same, and upload it: see RELEASING.md'
	@echo 'make clean   remove .venv and everything built'

demo: $(VENV)/.demo
	$(BIN)/python -m objcomm.demo --config objcomm/demo/digits.toml --nproc 4 --out $(OUT)

# More tests run in parallel than there are cores, because each waits now and then. With 6, two
# cores are always busy; with 8, `make test` took 390 s instead of 361, because each process
# collects all tests itself. The tests of `make test-long` wait longer. Each process has its own
# ranks, so it can run any test; one that runs out of tests takes some from the others.

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 6 --dist worksteal -m "not long" $(PYTEST_ARGS)

test-long: $(VENV)/.dev $(VENV)/.package
	$(BIN)/python -m pytest -n 8 --dist worksteal -m long $(PYTEST_ARGS)

# What a user gets today, while `make test` has the versions of the constraints: all requirements of
# objcomm and torch, and numpy, but not another torch, which takes minutes to download. The rest is
# from .venv.
NEWEST := $(VENV)-newest
test-newest: $(VENV)/.dev
	rm -rf $(NEWEST)
	$(BIN)/python -m venv $(NEWEST)
	ls -d $(CURDIR)/$(VENV)/lib/python*/site-packages \
		> $$(echo $(NEWEST)/lib/python*/site-packages)/rest.pth
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade \
		--upgrade-strategy eager --editable . numpy "$$(grep '^torch==' constraints.txt)"
	$(NEWEST)/bin/python -m pip list --disable-pip-version-check \
		--path $(NEWEST)/lib/python*/site-packages
	$(NEWEST)/bin/python -m pytest -n 6 --dist worksteal -m "not long" tests/unit/test_by_value.py \
		tests/unit/test_codecs.py tests/unit/test_hostile_objects.py tests/group/test_fidelity.py \
		tests/group/test_launch.py $(PYTEST_ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/python -m tests.prose

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.dev
	$(BIN)/mypy
	$(BIN)/pyright

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(VENV)/.dev
	$(BIN)/python -m bench all --json docs/benchmarks.jsonl
	$(BIN)/python -m bench report docs/benchmarks.jsonl -o docs/benchmarks.md

bench-smoke: $(VENV)/.dev
	$(BIN)/python -m bench broadcast --world 2 --smoke
	$(BIN)/python -m bench broadcasts --world 2 --smoke
	$(BIN)/python -m bench step_after_pause --world 2 --smoke

package: $(VENV)/.dev $(VENV)/.package
	$(BIN)/python -m tests.package

release: package
	$(BIN)/python -m twine upload --non-interactive dist/*

clean:
	rm -rf $(VENV) $(NEWEST) site build dist demo-out bench-out .mypy_cache .pytest_cache .ruff_cache .hypothesis

# One empty file per installed extra, so that an unchanged checkout installs nothing twice.
$(VENV)/.%: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'installing objcomm[$*] into $(VENV); torch makes this take a few minutes at first'
	@$(INSTALL) --editable '.[$*]'
	@touch $@

$(BIN)/python:
	@$(PYTHON) -m venv $(VENV)
