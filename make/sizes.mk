.PHONY: sz
sz: $(VENV)/.ready ## Files and functions that are too long, the longest first
	@$(PYTHON) -m tests.contract.sizes
