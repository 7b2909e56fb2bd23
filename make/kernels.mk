# The engine's CPU kernels. Without these targets an engine compiles them itself, once, when it first needs them.
.PHONY: kernels
kernels: ## Compile the CPU kernels for this machine into the package
	@$(PYTHON) -c "from headrace_engine.kernels import build; print(*build.build_into(), sep='\n')"

.PHONY: bench-kernels
bench-kernels: ## Microseconds of every kernel beside its torch reference
	@$(PYTHON) -m headrace_engine.kernels.bench
