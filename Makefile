# The commands of the project. `make demo` and `make test` work on a machine with Python, git and make.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2

.PHONY: help install demo test test-slow test-portable test-device verify compat lint format docs bench faults audit clean

help:  ## Show this help
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

# torch comes first and alone: any looser request would bring gigabytes of CUDA packages.
# timm comes without torchvision, whose operators do not load in this build of torch.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0 numpy
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps timm
	@touch $@

install: $(STAMP)  ## Make .venv and install the package with all its extras

demo: $(STAMP)  ## No regularization, dropout and Analytic side by side
	$(BIN)/undrop demo

test: $(STAMP)  ## The test suite (minutes)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m "not slow"

test-slow: $(STAMP)  ## All tests, with many draws and long training runs
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

# What an older CPU has no kernel for, or rounds in another way.
test-portable: $(STAMP)  ## The tests that depend on the CPU, as on one with AVX2 and on one without
	ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m "portable and not slow"
	ONEDNN_MAX_CPU_ISA=SSE41 ATEN_CPU_CAPABILITY=default $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m "portable and not slow"

MATHS := $(addprefix tests/,test_noise.py engines/test_exact.py engines/test_reverse.py engines/test_tangent.py \
	engines/test_stacked.py engines/test_fraction.py losses kernels nn objectives diagnosis/test_explicit.py)

# A stand-in for a GPU, which needs g++: no operation may mix its tensors with those of the CPU.
test-device: $(STAMP)  ## The math tests on a device that is not the CPU
	UNDROP_TEST_DEVICE=$(or $(DEVICE),stand_in) $(BIN)/python -m pytest -m "not slow" $(MATHS)

verify: $(STAMP)  ## What works on this machine and its GPU: verify.json and verify.html (minutes)
	PYTHONPATH=tests $(BIN)/python -m verify

# Other versions of torch, each in an environment of its own. The core suite is all but the slow tests,
# the fault campaign, the campaigns of experiments and what only the pinned versions promise; tests of
# packages that are absent skip themselves.
OLDEST := $(shell sed -n 's/.*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml)
CORE := tests --ignore tests/faults --ignore tests/lab/reproduce --ignore tests/test_gallery.py --ignore tests/test_docs.py

compat: compat-newest compat-$(OLDEST)  ## The core suite with the newest torch and with the oldest (gigabytes)

compat-newest: TORCH := torch
compat-%: TORCH = torch==$*.*
compat-%:  ## The core suite with another torch, as in compat-2.9
	$(PYTHON) -m venv --clear .venv-compat-$*
	.venv-compat-$*/bin/python -m pip install --quiet --disable-pip-version-check '$(TORCH)' -e '.[workbench,test]'
	.venv-compat-$*/bin/python -m pytest -n $(WORKERS) --dist loadgroup -m "not slow" $(CORE)
	rm -rf .venv-compat-$*

faults: $(STAMP)  ## The fault campaign: kills, full disks, bad bytes (hours)
	PYTHONPATH=tests $(BIN)/python -m faults --times $(or $(TIMES),100)
	PYTHONPATH=tests $(BIN)/python -m faults --bad-bytes --times $(or $(CASES),100000)
	UNDROP_LEAK_STEPS=2000 $(BIN)/python -m pytest tests/faults/test_leaks.py

audit: $(STAMP)  ## Look for known weaknesses of the pinned dependencies (asks the network)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check pip-audit
	$(BIN)/pip-audit --requirement constraints.txt --no-deps --disable-pip

lint: $(STAMP)  ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## Let ruff write the format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)  ## The documentation, into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:  ## Remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache site
