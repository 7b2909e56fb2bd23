"""The kinds of objects that the operator reads and writes, and where the API server has them. Pure."""

from __future__ import annotations

from headrace_operator import names

# Kind of every child, and the resource itself: (API group, version, plural).
RESOURCES: dict[str, tuple[str, str, str]] = {
    "Pod": ("", "v1", "pods"),
    "Service": ("", "v1", "services"),
    "ServiceAccount": ("", "v1", "serviceaccounts"),
    "ControllerRevision": ("apps", "v1", "controllerrevisions"),
    "Deployment": ("apps", "v1", "deployments"),
    "PodDisruptionBudget": ("policy", "v1", "poddisruptionbudgets"),
    "Role": ("rbac.authorization.k8s.io", "v1", "roles"),
    "RoleBinding": ("rbac.authorization.k8s.io", "v1", "rolebindings"),
    names.SCALER_KIND: (names.GROUP, names.VERSION, names.SCALER_PLURAL),
    names.COMPUTE_DOMAIN_KIND: ("resource.nvidia.com", "v1beta1", "computedomains"),
    names.WORKLOAD_KIND: ("scheduling.k8s.io", "v1alpha1", "workloads"),
    names.VOLCANO_KIND: ("scheduling.volcano.sh", "v1beta1", "podgroups"),
    names.KIND: (names.GROUP, names.VERSION, names.PLURAL),
}
# Children of kinds that a cluster may lack: `following.py` watches them where they are served.
OPTIONAL_KINDS = (names.COMPUTE_DOMAIN_KIND, names.WORKLOAD_KIND, names.VOLCANO_KIND)
CHILD_KINDS = tuple(kind for kind in RESOURCES if kind not in (names.KIND, *OPTIONAL_KINDS))
LEASES = ("coordination.k8s.io", "v1", "leases")
CHILD_SELECTOR = f"{names.LABEL_MANAGED_BY}={names.MANAGER}"
