# `make demo` and `make test` set up what they need (once) and run: Python 3.11 and make are all that must be there.
#
#   INSTALL=editable  (default)  the checkout itself, in .venv
#   INSTALL=wheel                the built wheel, in .venv-wheel: what a user gets, and what CI tests
#   ARGS="tests/strategy -x"     more arguments for pytest

PYTHON ?= python3
INSTALL ?= editable
WORKERS ?= $(shell getconf _NPROCESSORS_ONLN)
ARGS ?=

ifeq ($(INSTALL),editable)
VENV ?= .venv
else ifeq ($(INSTALL),wheel)
VENV ?= .venv-wheel
else
$(error INSTALL is '$(INSTALL)'; it must be editable or wheel)
endif

BIN := $(abspath $(VENV))/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.$(INSTALL)
SOURCES := $(shell find -L partway -name '*.py' -o -name '*.json') partway/py.typed README.md LICENSE
# One thread for each process: the tests run side by side and start processes of their own. Compiled files are kept, which
# each of them would make anew.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 PARTWAY_CHECKOUT="$(CURDIR)" PARTWAY_INSTALL=$(INSTALL) $(BIN)/pytest

.PHONY: help demo quick test test-long test-kits hosts check canaries bench gpu gpu-wheels conformance conformance-k8s oldest docs docs-serve format install clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo         train a real network over 8 virtual devices and show the plan'
	@echo 'make quick        run what answers within a minute: planning and a few simulated runs'
	@echo 'make test         run the tests of the core that take about a second each'
	@echo 'make test-long    run the others'
	@echo 'make test-kits    run the tests of kits/'
	@echo 'make hosts        run the tests on hosts of network namespaces (root on Linux)'
	@echo 'make canaries     make a fault of each class, and see that make test fails'
	@echo 'make check        ruff, mypy --strict, pyright and the import layers'
	@echo 'make format       let ruff rewrite what `make check` would complain about'
	@echo 'make conformance  run the slow tests, and the random ones with more examples'
	@echo 'make conformance-k8s  run jobs on a real API server of Kubernetes'
	@echo 'make oldest       run a slice of the tests with the lowest version of every dependency (gigabytes to fetch)'
	@echo 'make bench        run the benchmarks'
	@echo 'make gpu          all that a borrowed GPU is needed for, in 9 minutes (OUT=folder; DRY=1: without one)'
	@echo 'make gpu-wheels   fetch for it what the Python there may lack'
	@echo 'make docs         build the documentation into site/'
	@echo 'make docs-serve   serve it, and build it again when a page changes'
	@echo 'make install      only set up the virtual environment'
	@echo 'make clean        remove what these commands made'

demo: $(STAMP)
	$(BIN)/python examples/demo.py

# For every save: each stage's planning by its cheapest files, and a few runs on simulated ranks.
QUICK := $(addprefix tests/,strategy fusion $(addprefix propagation/,minsum problem memory search cost) runtime/executors/test_simulate.py models/test_numbers.py)

quick: $(STAMP)
	$(call pytest,-m "not slow and not gpu and not gloo" --hypothesis-profile dev $(QUICK))

# Each test takes about a second at most; tests/helpers/tiers.py has which stay although they do not.
TESTS := $(filter-out tests/kits tests/conformance tests/gpu tests/helpers tests/types,$(patsubst %/,%,$(wildcard tests/*/))) $(wildcard tests/test_*.py)

test: $(STAMP)
	$(call pytest,-m "not long and not slow and not gpu" $(TESTS))

test-long: $(STAMP)
	$(call pytest,-m "long and not slow and not gpu" $(TESTS) tests/conformance tests/gpu)

# The packages of kits/, which only import what the others have.
test-kits: $(STAMP)
	$(call pytest,-m "not slow and not gpu" tests/kits)

# Several hosts with links of given rates. One worker, and nothing beside it in `make conformance`: they measure.
hosts: WORKERS := 1
hosts: $(STAMP)
	$(call pytest,-m hosts tests/ecosystem)

# A fault of each class, one after another, and the test of `make test` that fails with it: about 10 minutes.
canaries: $(STAMP)
	$(BIN)/python tests/conformance/canaries.py

conformance: $(STAMP) $(VENV)/.ray oldest hosts
	command -v chromium || { [ "$$(id -u)" = 0 ] && apt-get install -y --no-install-recommends chromium; } || true
	$(call pytest,-m "(slow or deep or hypothesis) and not hosts and not gpu" --hypothesis-profile deep --timeout 3600)

# Jobs on a real API server of Kubernetes, which is built from Debian's sources the first time, as root: 4 to 20 minutes.
conformance-k8s: $(STAMP)
	bash tests/helpers/build_kubernetes.sh
	$(call pytest,-m slow tests/kits/operator/test_kubernetes.py)

# What is relied on of PyTorch's private names, and a slice of the tests, with the lower bounds of pyproject.toml: on
# Python 3.11 or 3.12, since later ones have no NumPy 1.26. The warnings are what typer 0.16 gets from a newer click.
oldest: .venv-oldest/.stamp
	OMP_NUM_THREADS=1 .venv-oldest/bin/pytest -n $(WORKERS) --dist loadgroup -m "not slow and not gpu" \
	  -W "ignore:'click.utils.get_:DeprecationWarning" --hypothesis-profile dev \
	  tests/test_torch_internals.py tests/models/test_models.py tests/api tests/kits/data $(QUICK)

.venv-oldest/.stamp: pyproject.toml constraints.txt tests/helpers/lowest.py
	$(PYTHON) -m venv --clear .venv-oldest
	$(PYTHON) tests/helpers/lowest.py >.venv-oldest/constraints.txt
	.venv-oldest/bin/python -m pip install -c .venv-oldest/constraints.txt torch 'setuptools>=77'
	.venv-oldest/bin/python -m pip install -c .venv-oldest/constraints.txt --no-build-isolation -e '.[test,demo]'
	@touch $@

# Hundreds of megabytes, which only slow tests need.
$(VENV)/.ray: $(STAMP)
	$(PIP) install -c constraints.txt 'ray[train]'
	@touch $@

bench: $(STAMP)
	@set -e; for script in $(wildcard benchmarks/*.py); do \
	  case $$script in *plan_time.py) quick=--quick ;; *) quick= ;; esac; \
	  echo "== $$script $$quick"; $(BIN)/python "$$script" $$quick; \
	done

# On a machine with a GPU PYTHON is one that has PyTorch for it; nothing is fetched there, nor installed in it.
OUT ?= out/gpu
MINUTES ?= 9
ifdef DRY
gpu: $(STAMP)
	$(BIN)/python tests/gpu/session.py --out $(OUT) --minutes $(MINUTES) --dry
else
gpu:
	$(PYTHON) tests/gpu/session.py --out $(OUT) --minutes $(MINUTES)
endif

# For Linux on x86-64; WHEELS is what is often missing beside PyTorch, with all that it needs itself.
GPU_PYTHON ?= 3.12
GPU_WHEELS ?= annotated-types expecttest hypothesis networkx pydantic pydantic-core sortedcontainers typing-inspection
gpu-wheels: $(STAMP)
	rm -rf wheels
	$(PIP) download -c constraints.txt --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) --implementation cp \
	  $(foreach n,28 27 17,--platform manylinux_2_$(n)_x86_64) --platform manylinux2014_x86_64 -d wheels $(GPU_WHEELS)

# Material says at each build when it ends; docs/design/documentation.md has it.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

# Pyright comes from npm, where that is installed and reached.
PYRIGHT ?= npx --yes pyright@1.1.414
check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p partway
	$(BIN)/mypy tests/types/uses.py
	PYTHONPATH=. $(BIN)/lint-imports
	@if $(PYRIGHT) --version; then $(PYRIGHT) --pythonpath $(BIN)/python; else echo 'pyright is skipped: npx does not find it'; fi

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(STAMP)

clean:
	rm -rf .venv .venv-wheel .venv-oldest build dist out site *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find partway strategy propagation fusion runtime tests examples benchmarks docs -name __pycache__ -prune -exec rm -rf {} +

# No build isolation: an isolated build fetches its own setuptools, unpinned.
$(VENV)/.editable: pyproject.toml constraints.txt
	$(call make_venv)
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[test,demo]'
	@touch $@

# The second install replaces a wheel of the same version, which pip would leave alone.
$(VENV)/.wheel: pyproject.toml constraints.txt $(SOURCES)
	$(call make_venv)
	$(call build_wheel)
	$(PIP) install -c constraints.txt "$$(echo $(VENV)/dist/*.whl)[test,demo]"
	$(PIP) install --quiet --no-deps --force-reinstall $(VENV)/dist/*.whl
	@touch $@

define make_venv
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Partway needs Python 3.11 or later; set PYTHON=")'
$(PYTHON) -m venv $(VENV)
$(PIP) install --quiet -c constraints.txt setuptools build
endef

# By way of the source distribution, so that both are known to hold every file.
define build_wheel
rm -rf $(VENV)/dist
$(BIN)/python -m build --no-isolation --outdir $(VENV)/dist . >$(VENV)/build.log 2>&1 || { cat $(VENV)/build.log; exit 1; }
endef

# The wheel is tested from a copy without the package's folders, so that nothing can reach the checkout's modules.
ifeq ($(INSTALL),wheel)
define pytest
@copy=$$(mktemp -d) && trap 'rm -rf "$$copy"' EXIT && \
cp -R $(wildcard tests examples benchmarks docs) README.md mkdocs.yml pyproject.toml "$$copy" && cd "$$copy" && \
$(PYTEST) -n $(WORKERS) --dist loadgroup $(1) $(ARGS)
endef
else
define pytest
$(PYTEST) -n $(WORKERS) --dist loadgroup $(1) $(ARGS)
endef
endif
