# A Kubernetes on this machine, and the images that run in it. `python3 e2e/cluster/cluster.py --help` has more.
CLUSTER := python3 e2e/cluster/cluster.py

.PHONY: cluster-up
cluster-up: ## Start a three-node Kubernetes on this machine (root; the first time builds it, 10 minutes)
	@kubeconfig=$$($(CLUSTER) up) && kubectl=$$($(CLUSTER) kubectl-path) && \
	printf '\nThe cluster is up. To use it:\n  export KUBECONFIG=%s PATH=%s:$$PATH\n  kubectl get nodes\n' \
		"$$kubeconfig" "$$(dirname "$$kubectl")"

.PHONY: cluster-down
cluster-down: ## Stop it and remove every trace of it but the cache (WIPE=1: its state too)
	@$(CLUSTER) down $(if $(WIPE),--wipe)

.PHONY: cluster-status
cluster-status: ## Show as JSON what of it runs
	@$(CLUSTER) status

.PHONY: image
image: setup ## Make the images that changed and print their names as JSON
	@$(CLUSTER) images
