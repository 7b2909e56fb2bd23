"""The part of the resource that says where groups may run."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from headrace_operator import names
from headrace_operator.rules import Rule, RuledModel

_LABEL_KEY = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"


class Placement(RuledModel):
    """Makes the operator look for room before it makes a group, and choose where the group goes.

    But for computeDomain it is not part of a role's revision: a running group computes the same wherever it is, and
    moving it would cost a reload of its weights. A change applies to groups that are made from then on.
    """

    domain_label: str = Field(
        default="nvidia.com/gpu.clique",
        max_length=316,
        pattern=_LABEL_KEY,
        description="Node label whose value names the domain (rack, NVLink domain) that a node is in. "
        "Default: nvidia.com/gpu.clique.",
    )
    group: Literal["Any", "SameDomain", "SameNode"] = Field(
        default="Any",
        description="Where the pods of one group go: Any, SameDomain (all in one domain) or SameNode. Default: Any.",
    )
    deployment: Literal["Any", "SameDomain"] = Field(
        default="Any",
        description="Where the groups of the deployment go: Any, or SameDomain (prefill and decode all in one domain; "
        "the first groups are only made in a domain that has room for the whole deployment). Default: Any.",
    )
    enforcement: Literal["Required", "Preferred"] = Field(
        default="Required",
        description="Required: a group waits until there is room where it may go; Preferred: it goes elsewhere if "
        "there is none. Default: Required.",
    )

    compute_domain: bool = Field(
        default=False,
        description="true: every group of several pods gets a ComputeDomain of its own (resource.nvidia.com/v1beta1, "
        "of NVIDIA's DRA driver for GPUs), so that its pods share GPU memory over NVLink across nodes; needs group "
        "SameDomain. A change is a roll-out of the roles that have such groups. Default: false.",
    )

    gang: Literal["None", "Native", "Volcano", "Kueue"] = Field(
        default="None",
        description="Who sees to it that all pods of a group get nodes or none does. None: the operator, which looks "
        "for room first and takes back a group that is half placed for 60 s. Native: the scheduler too, by a Workload "
        "(scheduling.k8s.io/v1alpha1). Volcano: its scheduler, by a PodGroup (scheduling.volcano.sh/v1beta1). Kueue: "
        "its pod groups, one for each group of pods. Default: None.",
    )
    queue: str | None = Field(
        default=None,
        min_length=1,
        max_length=63,
        pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$",
        description="Queue that groups are charged to: a Kueue LocalQueue of the resource's namespace (required with "
        "gang: Kueue), or a Volcano Queue. Default: none (Volcano's own default queue).",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.enforcement == 'Required' || self.group != 'Any' || self.deployment != 'Any'",
            message="enforcement: Preferred needs a preference: set group or deployment to other than Any",
            holds=lambda p: p.enforcement == "Required" or p.group != "Any" or p.deployment != "Any",
        ),
        Rule(
            cel="!has(self.computeDomain) || !self.computeDomain || self.group == 'SameDomain'",
            message="computeDomain needs group: SameDomain: memory is shared within one NVLink domain only",
            holds=lambda p: not p.compute_domain or p.group == "SameDomain",
        ),
        Rule(
            cel=f"!has(self.gang) || self.gang != '{names.GANG_KUEUE}' || has(self.queue)",
            message="gang: Kueue needs queue: Kueue leaves pods without a queue alone",
            holds=lambda p: p.gang != names.GANG_KUEUE or p.queue is not None,
        ),
        Rule(
            cel=f"!has(self.queue) || (has(self.gang) && self.gang in ['{names.GANG_KUEUE}', '{names.GANG_VOLCANO}'])",
            message="queue needs gang: Kueue or Volcano",
            holds=lambda p: p.queue is None or p.gang in (names.GANG_KUEUE, names.GANG_VOLCANO),
        ),
    )
