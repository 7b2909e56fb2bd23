"""APIs that a cluster may lack, and what to do about it where a deployment asks for one. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from headrace_operator import names


@dataclass(frozen=True)
class OptionalApi:
    """What asks for an API, and where it comes from."""

    asked_by: str
    api: str
    remedy: str

    @property
    def missing(self) -> str:
        """That the cluster does not serve it."""
        return f"{self.asked_by} needs the API {self.api}, which this cluster does not serve: {self.remedy}"

    def unusable(self, problem: str) -> str:
        return f"{self.asked_by} needs the API {self.api}: {problem}"


# No kind of ours: Kueue reads labels of pods.
KUEUE = names.GANG_KUEUE
# What each gang needs.
GANG_KINDS = {
    names.GANG_NATIVE: names.WORKLOAD_KIND,
    names.GANG_VOLCANO: names.VOLCANO_KIND,
    names.GANG_KUEUE: KUEUE,
}

OPTIONAL_APIS: dict[str, OptionalApi] = {
    names.COMPUTE_DOMAIN_KIND: OptionalApi(
        "spec.placement.computeDomain",
        "resource.nvidia.com/v1beta1",
        "install NVIDIA's DRA driver for GPUs with its ComputeDomains, or remove the field",
    ),
    names.WORKLOAD_KIND: OptionalApi(
        "spec.placement.gang: Native",
        "scheduling.k8s.io/v1alpha1",
        "start Kubernetes 1.35's API server and scheduler with the feature gates GenericWorkload and GangScheduling, "
        "and the API server with --runtime-config=scheduling.k8s.io/v1alpha1=true; or choose another gang",
    ),
    names.VOLCANO_KIND: OptionalApi(
        "spec.placement.gang: Volcano", "scheduling.volcano.sh/v1beta1", "install Volcano, or choose another gang"
    ),
    KUEUE: OptionalApi(
        "spec.placement.gang: Kueue",
        names.KUEUE_GROUP,
        "install Kueue with its integration of plain pods, or choose another gang",
    ),
}
