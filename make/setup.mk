# The Python environment, from the pinned requirements (hashes, no lock file: it would record registry addresses).
UV ?= $(shell command -v uv 2>/dev/null || echo python3 -m uv)
REQUIREMENTS := requirements/dev.txt

.PHONY: setup
setup: $(VENV)/.ready ## Make .venv with every dependency, pinned by hash

$(VENV)/.ready: $(REQUIREMENTS) pyproject.toml
	@command -v uv >/dev/null 2>&1 || python3 -m uv --version >/dev/null 2>&1 || python3 -m pip install --quiet --root-user-action=ignore uv
	@[ -x $(PYTHON) ] || $(UV) venv --quiet --python 3.11 $(VENV)
	@# Byte code now: where Python may not write it, every process would compile what it imports (torch: seconds).
	@$(UV) pip sync --quiet --compile-bytecode --python $(PYTHON) $(REQUIREMENTS)
	@$(UV) pip install --quiet --python $(PYTHON) --no-deps --editable .
	@touch $@

COMPILE := $(UV) pip compile --quiet pyproject.toml --override requirements/overrides.txt --python-version 3.11 \
	--python-platform x86_64-manylinux_2_31 --generate-hashes --no-header --no-annotate

.PHONY: requirements
requirements: ## Resolve requirements/*.txt again (commit the result)
	$(COMPILE) --extra operator -o requirements/operator.txt
	$(COMPILE) --extra engine -o requirements/engine.txt
	$(COMPILE) --extra router -o requirements/router.txt
	$(COMPILE) --all-extras --group dev -o requirements/dev.txt
