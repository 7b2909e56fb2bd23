# The operator: its CRD, its chart and their tests.
CRD_FILE := headrace.dev_disaggdeployments.yaml
CRD_COPIES := crds/$(CRD_FILE) charts/headrace/crds/$(CRD_FILE)

.PHONY: crds
crds: $(VENV)/.ready ## Write the CRD from the operator's api.py
	$(PYTHON) -m headrace_operator.crd $(CRD_COPIES)

.PHONY: crds-check
crds-check: $(VENV)/.ready ## Fail if the committed CRD differs from api.py
	$(PYTHON) -m headrace_operator.crd --check $(CRD_COPIES)

.PHONY: operator-e2e
operator-e2e: setup ## The operator alone on a real Kubernetes: the table of rules, repair, roll-out
	$(PYTEST) tests/operator -m e2e -q
