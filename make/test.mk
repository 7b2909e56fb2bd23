# Tests. `check` is what one runs while working; `test` is everything, and installs and starts all that it needs.
PYTEST := $(BIN)/python -m pytest
# Unit tests use small tensors: more threads than cores only fight each other.
FAST_ENV := OMP_NUM_THREADS=1

.PHONY: lint
lint: setup ## Style, formatting, the walls between packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

.PHONY: types
types: setup ## mypy (strict in the operator and in pure modules)
	$(BIN)/mypy

.PHONY: unit
unit: setup ## Everything that needs neither a cluster nor minutes
	$(FAST_ENV) $(PYTEST) tests -m "not slow and not e2e and not gpu" -n 2 --dist loadscope -q

.PHONY: check
check: lint types crds-check unit ## Lint, types, generated files, unit tests: under 3 minutes

.PHONY: slow
slow: setup ## Parity with transformers at length, and P/D between real processes
	$(FAST_ENV) $(PYTEST) tests -m "slow and not e2e and not gpu" -n 2 --dist loadscope -q

.PHONY: local
local: setup ## Unit and slow tests together: what one waits for is the other's time
	$(FAST_ENV) $(PYTEST) tests -m "not e2e and not gpu" -n 2 --dist loadscope -q

.PHONY: e2e
e2e: setup ## Scenarios on a real Kubernetes (KUBECONFIG, or the one of `make cluster-up`)
	$(PYTHON) e2e/run.py $(E2E_ARGS)

.PHONY: long
long: setup ## Scenarios on a real Kubernetes that wait for minutes: outages, power cuts, time limits, Kueue's build
	$(PYTHON) e2e/run.py --long $(E2E_ARGS)

.PHONY: test
test: lint types crds-check local e2e ## Everything but `long`: lint, types, unit, contract, chart, parity, P/D, end to end

.PHONY: quickstart
quickstart: setup ## From nothing to a served token: cluster, chart, docs/examples/tiny-2p1d.yaml, one question
	@$(PYTHON) e2e/quickstart.py
