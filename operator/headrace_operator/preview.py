"""What the operator would apply for a resource that has nothing yet. Pure."""

from __future__ import annotations

from typing import Any

from headrace_operator.api import DisaggDeployment
from headrace_operator.api_status import Status
from headrace_operator.decide import Defaults, decide
from headrace_operator.observe import observe


def preview(deployment: DisaggDeployment, defaults: Defaults) -> list[dict[str, Any]]:
    """All objects, in the order in which they would be made."""
    nothing = observe(deployment.metadata.name, deployment.metadata.uid, [])
    decision = decide(deployment, nothing, Status(), defaults, now=0.0)
    return [application.body for application in decision.apply]
