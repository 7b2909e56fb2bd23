"""The daemons that are not a node's: etcd, API server, controllers, scheduler, Service proxy, DNS."""

from __future__ import annotations

import json
from pathlib import Path

from .addresses import (
    APISERVER,
    BRIDGE_IP,
    CLUSTER_DOMAIN,
    CONTROLLER_MANAGER,
    DNS_HEALTH,
    DNS_READY,
    ETCD_PEER_URL,
    ETCD_URL,
    NODE_NETWORK,
    NODES,
    POD_NETWORK,
    PROXY_HEALTH,
    PROXY_METRICS,
    REGISTRY_LISTENER,
    SCHEDULER,
    SERVICE_NETWORK,
)
from .daemons import Daemon
from .files import write_if_changed
from .layout import Layout

# A dead node is seen after this time; its pods are then given away after the toleration. Kubernetes' own
# defaults (40 s and 5 min) would make every test of a node's death last six minutes.
NODE_MONITOR_GRACE_SECONDS = 20
NOT_READY_TOLERATION_SECONDS = 30

_GANG_GATES = "GenericWorkload=true,GangScheduling=true"


def etcd(binaries: Path, layout: Layout) -> Daemon:
    """Without fsync: the state is worth no more than the machine's uptime, and every write would wait for the disk."""
    flags = {
        "data-dir": layout.etcd,
        "listen-client-urls": ETCD_URL,
        "advertise-client-urls": ETCD_URL,
        "listen-peer-urls": ETCD_PEER_URL,
        "initial-advertise-peer-urls": ETCD_PEER_URL,
        "initial-cluster": f"default={ETCD_PEER_URL}",
        "unsafe-no-fsync": "true",
        "log-level": "warn",
    }
    return Daemon("etcd", [binaries / "etcd", *_flags(flags)])


def apiserver(binaries: Path, layout: Layout) -> Daemon:
    pki = layout.pki
    flags = {
        "etcd-servers": ETCD_URL,
        "bind-address": APISERVER.ip,
        "secure-port": APISERVER.port,
        "advertise-address": APISERVER.ip,
        "service-cluster-ip-range": SERVICE_NETWORK,
        "client-ca-file": pki / "ca.crt",
        "tls-cert-file": pki / "apiserver.crt",
        "tls-private-key-file": pki / "apiserver.key",
        "service-account-key-file": pki / "service-accounts.pub",
        "service-account-signing-key-file": pki / "service-accounts.key",
        "service-account-issuer": f"https://kubernetes.default.svc.{CLUSTER_DOMAIN}",
        "authorization-mode": "Node,RBAC",
        "enable-admission-plugins": "NodeRestriction",
        "allow-privileged": "true",
        # Gangs of the scheduler itself (Workload), which are alpha in this version.
        "feature-gates": _GANG_GATES,
        "runtime-config": "scheduling.k8s.io/v1alpha1=true",
        # Logs, exec and port-forward reach a kubelet by its address: node names are in no DNS.
        "kubelet-preferred-address-types": "InternalIP",
        "kubelet-certificate-authority": pki / "ca.crt",
        "kubelet-client-certificate": pki / "admin.crt",
        "kubelet-client-key": pki / "admin.key",
        "default-not-ready-toleration-seconds": NOT_READY_TOLERATION_SECONDS,
        "default-unreachable-toleration-seconds": NOT_READY_TOLERATION_SECONDS,
        # A thousand pretended pods change state at once; the defaults would queue their updates.
        "max-requests-inflight": 2000,
        "max-mutating-requests-inflight": 1000,
    }
    certificates = [pki / name for name in ("ca.crt", "apiserver.crt", "admin.crt", "service-accounts.pub")]
    return Daemon("kube-apiserver", [binaries / "kube-apiserver", *_flags(flags)], certificates)


def controller_manager(binaries: Path, layout: Layout) -> Daemon:
    pki = layout.pki
    flags = {
        "kubeconfig": pki / "controller-manager.kubeconfig",
        "bind-address": CONTROLLER_MANAGER.ip,
        "secure-port": CONTROLLER_MANAGER.port,
        "leader-elect": "false",
        "use-service-account-credentials": "true",
        "service-account-private-key-file": pki / "service-accounts.key",
        "root-ca-file": pki / "ca.crt",
        "cluster-signing-cert-file": pki / "ca.crt",
        "cluster-signing-key-file": pki / "ca.key",
        "node-monitor-period": "2s",
        "node-monitor-grace-period": f"{NODE_MONITOR_GRACE_SECONDS}s",
        "kube-api-qps": 500,
        "kube-api-burst": 1000,
    }
    argv = [binaries / "kube-controller-manager", *_flags(flags)]
    return Daemon("kube-controller-manager", argv, [pki / "ca.crt", pki / "controller-manager.crt"])


def scheduler(binaries: Path, layout: Layout) -> Daemon:
    config = layout.config / "scheduler.yaml"
    content = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"kubeconfig": str(layout.pki / "scheduler.kubeconfig"), "qps": 1000, "burst": 2000},
    }
    write_if_changed(config, json.dumps(content, indent=1))
    flags = {
        "config": config,
        "bind-address": SCHEDULER.ip,
        "secure-port": SCHEDULER.port,
        "feature-gates": _GANG_GATES,
    }
    argv = [binaries / "kube-scheduler", *_flags(flags)]
    return Daemon("kube-scheduler", argv, [config, layout.pki / "scheduler.crt"])


def proxy(binaries: Path, layout: Layout) -> Daemon:
    """One Service proxy for all nodes: they share the machine's network."""
    config = layout.config / "proxy.yaml"
    content = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clientConnection": {"kubeconfig": str(layout.pki / "proxy.kubeconfig")},
        "clusterCIDR": POD_NETWORK,
        "hostnameOverride": NODES[0],
        "bindAddress": "0.0.0.0",
        "healthzBindAddress": f"{PROXY_HEALTH.ip}:{PROXY_HEALTH.port}",
        "metricsBindAddress": f"{PROXY_METRICS.ip}:{PROXY_METRICS.port}",
        "conntrack": {"maxPerCore": 0},  # leave the machine's own limit
        "nodePortAddresses": [NODE_NETWORK],
    }
    write_if_changed(config, json.dumps(content, indent=1))
    return Daemon("kube-proxy", [binaries / "kube-proxy", f"--config={config}"], [config, layout.pki / "proxy.crt"])


def coredns(binaries: Path, layout: Layout) -> Daemon:
    """DNS on the bridge. Names outside the cluster do not exist: pods have no way out."""
    config = layout.config / "Corefile"
    zones = f"{CLUSTER_DOMAIN} in-addr.arpa ip6.arpa"
    write_if_changed(
        config,
        f"""{zones} {{
    bind {BRIDGE_IP}
    errors
    health {DNS_HEALTH.ip}:{DNS_HEALTH.port}
    ready {DNS_READY.ip}:{DNS_READY.port}
    kubernetes {zones} {{
        kubeconfig {layout.pki}/coredns.kubeconfig
        pods insecure
        ttl 5
    }}
    cache 5
}}
. {{
    bind {BRIDGE_IP}
    template ANY ANY . {{
        rcode NXDOMAIN
    }}
}}
""",
    )
    return Daemon("coredns", [binaries / "coredns", "-conf", config], [config, layout.pki / "coredns.crt"])


def registry(layout: Layout) -> Daemon:
    """Debian's docker-registry, on loopback, reached by every containerd."""
    config = layout.registry_config
    content = {
        "version": 0.1,
        "log": {"level": "warn", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(layout.registry)}, "delete": {"enabled": True}},
        "http": {"addr": f"{REGISTRY_LISTENER.ip}:{REGISTRY_LISTENER.port}"},
    }
    write_if_changed(config, json.dumps(content, indent=1))
    return Daemon("registry", ["docker-registry", "serve", config], [config])


def _flags(flags: dict[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in flags.items()]
