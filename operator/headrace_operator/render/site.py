"""Where a pod runs, as data: the same template is rendered for a cluster's pods and for local processes."""

from __future__ import annotations

from dataclasses import dataclass

from headrace_operator import names
from headrace_operator.api_engine import ModelSource

LOOPBACK = "127.0.0.1"
MODEL_MOUNT = "/model"  # where a cluster's pods see the checkpoint's volume


@dataclass(frozen=True)
class Site:
    """Addresses, ports and paths of one pod."""

    leader_host: str
    host: str  # address to listen on
    http_port: int
    rendezvous_port: int  # on the leader
    control_port: int  # on the leader
    model_dir: str  # unused for tiny models


def cluster_site(deployment: str, role: str, revision: str, group: int, num_pods: int, source: ModelSource) -> Site:
    """Every pod has an address of its own, so all use the same ports. A group of one pod needs no name service."""
    return Site(
        leader_host=names.leader_host(deployment, role, revision, group) if num_pods > 1 else LOOPBACK,
        host="0.0.0.0",
        http_port=names.PORT_HTTP,
        rendezvous_port=names.PORT_RENDEZVOUS,
        control_port=names.PORT_CONTROL,
        model_dir=f"{MODEL_MOUNT}/{source.pvc.path}".rstrip("/") if source.pvc else MODEL_MOUNT,
    )


def local_site(http_port: int, rendezvous_port: int, control_port: int, source: ModelSource) -> Site:
    """All processes share 127.0.0.1, so each has ports of its own. A claim cannot be seen from here: ValueError."""
    if source.pvc:
        raise ValueError("model.source.pvc needs a cluster; use hostPath or tiny to run locally")
    return Site(
        leader_host=LOOPBACK,
        host=LOOPBACK,
        http_port=http_port,
        rendezvous_port=rendezvous_port,
        control_port=control_port,
        model_dir=source.host_path.path if source.host_path else "",
    )
