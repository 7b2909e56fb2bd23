# The operator: its CRDs, its chart and their tests.
CRD_FOLDERS := crds charts/headrace/crds

.PHONY: crds
crds: $(VENV)/.ready ## Write the CRDs from the operator's api.py
	$(PYTHON) -m headrace_operator.crd $(CRD_FOLDERS)

.PHONY: crds-check
crds-check: $(VENV)/.ready ## Fail if the committed CRDs differ from api.py
	$(PYTHON) -m headrace_operator.crd --check $(CRD_FOLDERS)

.PHONY: operator-e2e
operator-e2e: setup ## The operator alone on a real Kubernetes: the table of rules, repair, roll-out
	$(PYTEST) tests/operator -m e2e -q
