.PHONY: bench-router
bench-router: $(VENV)/.ready ## Measure what the router adds to a direct call, with fake engines
	PYTHONPATH=. $(PYTHON) tests/router/overhead.py
