"""Every address, port and name that the cluster takes on this machine: the one place where they are written down."""

from __future__ import annotations

from dataclasses import dataclass

NODES = ("node1", "node2", "node3")

BRIDGE = "headrace0"  # every pod's veth ends here
BRIDGE_IP = "10.88.0.1"  # the pods' gateway; the API server and DNS listen on it
POD_NETWORK = "10.88.0.0/16"
POD_RANGE = ("10.88.1.0", "10.88.250.255")  # what the CNI hands out
POD_NETWORK_NAME = "headrace-pods"  # of the CNI configuration

SERVICE_NETWORK = "10.96.0.0/16"
KUBERNETES_SERVICE_IP = "10.96.0.1"  # the first of SERVICE_NETWORK, by Kubernetes' own rule
DNS_SERVICE_IP = "10.96.0.10"
CLUSTER_DOMAIN = "cluster.local"

NODE_NETWORK = "10.89.0.0/24"  # node addresses are /32s on lo, so that each kubelet has a port 10250 of its own
KWOK_NETWORK = "10.77.0.0/16"  # pods of pretended nodes; nothing routes there
KWOK_NODE_IP = "10.77.255.1"

LOOPBACK = "127.0.0.1"
REGISTRY = f"{LOOPBACK}:5000"


def node_ip(node: str) -> str:
    """`node2` -> `10.89.0.2`."""
    return f"10.89.0.{NODES.index(node) + 1}"


@dataclass(frozen=True)
class Listener:
    """One TCP address that a part of the cluster listens on."""

    ip: str
    port: int
    part: str


ETCD = Listener(LOOPBACK, 2379, "etcd")
ETCD_PEER = Listener(LOOPBACK, 2380, "etcd")
REGISTRY_LISTENER = Listener(LOOPBACK, 5000, "registry")
APISERVER = Listener(BRIDGE_IP, 6443, "kube-apiserver")
CONTROLLER_MANAGER = Listener(LOOPBACK, 10257, "kube-controller-manager")
SCHEDULER = Listener(LOOPBACK, 10259, "kube-scheduler")
PROXY_HEALTH = Listener(LOOPBACK, 10256, "kube-proxy")
PROXY_METRICS = Listener(LOOPBACK, 10249, "kube-proxy")
DNS = Listener(BRIDGE_IP, 53, "coredns")
DNS_HEALTH = Listener(LOOPBACK, 8081, "coredns")
DNS_READY = Listener(LOOPBACK, 8181, "coredns")
KWOK = Listener(LOOPBACK, 10247, "kwok")
KUBELETS = tuple(Listener(node_ip(node), 10250, f"kubelet-{node}") for node in NODES)

CONTROL_PLANE_LISTENERS = (
    ETCD,
    ETCD_PEER,
    REGISTRY_LISTENER,
    APISERVER,
    CONTROLLER_MANAGER,
    SCHEDULER,
    PROXY_HEALTH,
    PROXY_METRICS,
    DNS,
    DNS_HEALTH,
    DNS_READY,
    *KUBELETS,
)

APISERVER_URL = f"https://{APISERVER.ip}:{APISERVER.port}"
ETCD_URL = f"http://{ETCD.ip}:{ETCD.port}"
ETCD_PEER_URL = f"http://{ETCD_PEER.ip}:{ETCD_PEER.port}"
REGISTRY_URL = f"http://{REGISTRY}"
