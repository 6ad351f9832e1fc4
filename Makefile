# Two commands do everything: `make lab` and `make test`. `make help` lists the rest.
PYTHON ?= python3
ifneq ($(filter 3.%,$(PYTHON)),)  # of `make wheelhouse PYTHON=3.12`, a node's version and no command of this machine
VERSION := $(PYTHON)
override PYTHON := python3
endif
N ?= 3
BIN := .venv/bin
export PYTHONDONTWRITEBYTECODE := 1

.PHONY: help
help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

.PHONY: venv
venv: .venv/requirements  ## make .venv from the pinned requirements

.venv/requirements: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit("gpuwright needs Python 3.10 or later: make PYTHON=python3.12 …" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.txt
	@touch $@

.venv/requirements-dev: .venv/requirements requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-dev.txt
	@touch $@

.PHONY: lab
lab: venv  ## this machine as a node: install, patch, serve and benchmark (about 10 GB in .lab/ and uv's cache)
	$(BIN)/pyinfra inventory/lab.py deploy.py -y

.PHONY: lab-down
lab-down: venv  ## stop the lab's server and remove .lab/
	@test ! -d .lab/node || $(BIN)/pyinfra inventory/lab.py stop.py -y
	@test ! -d .lab/fleet || $(BIN)/python -m tests.fleet.nodes down
	rm -rf .lab

.PHONY: fleet
fleet: venv  ## N=3 Debian nodes on this machine, in containers, to deploy to over SSH (needs root)
	@$(BIN)/python -m tests.fleet.nodes up $(N)

.PHONY: fleet-down
fleet-down: venv  ## power the fleet off, remove it and all that it set up
	@$(BIN)/python -m tests.fleet.nodes down

.PHONY: test
test: .venv/requirements-dev  ## every test: unit, operations, fleet, lab (two stacks: 10 GB to download)
	@mkdir -p .test-results
	$(BIN)/python -m pytest --junitxml=.test-results/junit.xml --durations=15

.PHONY: test-quick
test-quick: .venv/requirements-dev  ## the tests that need no node: unit, operations
	$(BIN)/python -m pytest tests/unit tests/operations

.PHONY: lint
lint: .venv/requirements-dev  ## ruff, and the catalogue's own check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m gpuwright check

.PHONY: types
types: .venv/requirements-dev  ## mypy --strict
	$(BIN)/mypy

.PHONY: lock
lock: venv  ## recompile files/locks from catalog/stacks (needs the package index)
	$(BIN)/python -m gpuwright lock

.PHONY: wheelhouse
wheelhouse: venv  ## gather the wheels of STACK=… for PYTHON=3.12 in wheelhouse/ (needs the package index)
	@$(if $(and $(STACK),$(VERSION)),,$(error name both: make wheelhouse STACK=… PYTHON=3.12))
	$(BIN)/python -m gpuwright wheelhouse $(STACK) --python $(VERSION) $(if $(TO),--to $(TO)) $(if $(PRUNE),--prune)

.PHONY: flags
flags: venv  ## read files/flags anew from the engines' pinned wheels (needs the package index)
	$(BIN)/python -m gpuwright flags

.PHONY: golden
golden: .venv/requirements-dev  ## write the rendered launch scripts in tests/golden anew
	UPDATE_GOLDEN=1 $(BIN)/python -m pytest -q tests/unit/test_scripts.py

.PHONY: requirements
requirements: venv  ## recompile requirements*.txt from requirements*.in (needs the package index)
	$(BIN)/uv pip compile -q --universal --python-version 3.10 --generate-hashes --no-annotate \
	  --custom-compile-command "make requirements" requirements.in -o requirements.txt
	$(BIN)/uv pip compile -q --universal --python-version 3.10 --generate-hashes --no-annotate \
	  --custom-compile-command "make requirements" requirements-dev.in -o requirements-dev.txt
