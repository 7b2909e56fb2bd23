"""Services and stored revisions of a role. Pure."""

from __future__ import annotations

from typing import Any

from headrace_operator import names
from headrace_operator.render.objects import Owner, metadata, stamped
from headrace_operator.revision import RoleTemplate


def role_service(owner: Owner, role: str) -> dict[str, Any]:
    """The leaders of a role's groups, of every revision: ranks meet there, and routers follow it.

    It publishes leaders that are not ready, since ranks meet in order to become ready; which of them are, their
    EndpointSlices say as well (`serving`). Not the other pods, for which nobody asks: of every pod more the cluster
    writes all addresses once more."""
    ports = {"http": names.PORT_HTTP, "rendezvous": names.PORT_RENDEZVOUS, "control": names.PORT_CONTROL}
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": names.leader_labels(owner.name, role),
        "ports": [{"name": port, "port": number, "targetPort": number} for port, number in ports.items()],
    }
    meta = metadata(owner, names.role_service_name(owner.name, role), names.role_labels(owner.name, role))
    return stamped({"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": spec})


def controller_revision(owner: Owner, role: str, revision: str, template: RoleTemplate, number: int) -> dict[str, Any]:
    """The template of a revision, with the engine image that it began with. Written once, never changed;
    `number` is the generation of the resource that first had it."""
    body = {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": metadata(
            owner,
            names.revision_name(owner.name, role, revision),
            {
                **names.revision_labels(owner.name, role, revision),
                names.LABEL_KV_FINGERPRINT: template.kv_fingerprint,
            },
        ),
        "data": template.as_written(),
        "revision": number,
    }
    return stamped(body)
