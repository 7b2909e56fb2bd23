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


OPTIONAL_APIS: dict[str, OptionalApi] = {
    names.COMPUTE_DOMAIN_KIND: OptionalApi(
        "spec.placement.computeDomain",
        "resource.nvidia.com/v1beta1",
        "install NVIDIA's DRA driver for GPUs with its ComputeDomains, or remove the field",
    ),
}
