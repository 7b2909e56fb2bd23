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

.PHONY: soak
soak: setup ## Random operations against ten deployments on pretended racks, until SECONDS or COUNT are over (SEED repeats one)
	SOAK_SEED=$(SEED) SOAK_OPERATIONS=$(or $(COUNT),200) SOAK_SECONDS=$(or $(SECONDS),300) \
		$(PYTHON) e2e/run.py --long -s tests/operator/test_cluster_soak.py
