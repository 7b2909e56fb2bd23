"""Services and stored revisions of a role. Pure."""

from __future__ import annotations

from typing import Any

from headrace_operator import names
from headrace_operator.render.objects import Owner, metadata, stamped
from headrace_operator.revision import RoleTemplate


def group_service(owner: Owner, role: str, revision: str) -> dict[str, Any]:
    """Gives the leaders of one revision DNS names before they are ready: ranks meet there in order to become ready.

    Not the other pods, for which nobody asks: of every pod more the cluster writes all addresses once more."""
    labels = names.revision_labels(owner.name, role, revision)
    selector = {**names.leader_labels(owner.name, role), names.LABEL_REVISION: revision}
    return _headless(
        owner,
        names.revision_name(owner.name, role, revision),
        labels,
        selector,
        ports={"rendezvous": names.PORT_RENDEZVOUS, "control": names.PORT_CONTROL},
        publishNotReadyAddresses=True,
    )


def role_service(owner: Owner, role: str) -> dict[str, Any]:
    """The ready leaders of a role, of every revision: what routers follow."""
    labels = names.role_labels(owner.name, role)
    selector = names.leader_labels(owner.name, role)
    return _headless(
        owner, names.role_service_name(owner.name, role), labels, selector, ports={"http": names.PORT_HTTP}
    )


def _headless(
    owner: Owner,
    name: str,
    labels: dict[str, str],
    selector: dict[str, str],
    ports: dict[str, int],
    **extra: Any,
) -> dict[str, Any]:
    spec = {
        "clusterIP": "None",
        "selector": selector,
        "ports": [{"name": port, "port": number, "targetPort": number} for port, number in ports.items()],
        **extra,
    }
    return stamped({"apiVersion": "v1", "kind": "Service", "metadata": metadata(owner, name, labels), "spec": spec})


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
