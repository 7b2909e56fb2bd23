"""The DisaggRoleScaler of a role: where autoscalers write. Pure."""

from __future__ import annotations

from typing import Any

from headrace_operator import names
from headrace_operator.render.objects import Owner, metadata


def role_scaler(owner: Owner, role: str, replicas: int) -> dict[str, Any]:
    """A scaler that starts at `replicas` groups. Its spec is written once; from then on it is other people's."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.SCALER_KIND,
        "metadata": metadata(owner, names.scaler_name(owner.name, role), names.role_labels(owner.name, role)),
        "spec": {"replicas": replicas},
    }
