"""The machine's network as the cluster needs it: a bridge for pods, an address per node; and taking all of it away."""

from __future__ import annotations

import json
import re
from pathlib import Path

from .addresses import BRIDGE, BRIDGE_IP, NODES, POD_NETWORK, POD_NETWORK_NAME, POD_RANGE, node_ip
from .console import attempt, run
from .files import write_if_changed

SYSCTLS = {
    "net/ipv4/ip_forward": "1",
    # Without it a reply between two pods of the bridge skips the address translation of Services.
    "net/bridge/bridge-nf-call-iptables": "1",
}
CNI_RESULTS = Path("/var/lib/cni/results")
CHAINS = re.compile(r"^:((?:KUBE|CNI)-\S+)", re.MULTILINE)
NAMESPACES = re.compile(r'"sandbox":\s*"([^"]+)"')
RULES = re.compile(r"^-A (.*-j (?:KUBE|CNI)-.*)$", re.MULTILINE)


def cni_config(pod_addresses: Path) -> str:
    """The CNI configuration: pods on one bridge, addresses from one shared range."""
    ipam = {
        "type": "host-local",
        "dataDir": str(pod_addresses),
        "ranges": [
            [{"subnet": POD_NETWORK, "rangeStart": POD_RANGE[0], "rangeEnd": POD_RANGE[1], "gateway": BRIDGE_IP}]
        ],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {"type": "bridge", "bridge": BRIDGE, "isGateway": True, "ipMasq": False, "hairpinMode": True, "ipam": ipam}
    portmap = {"type": "portmap", "capabilities": {"portMappings": True}}
    return json.dumps({"cniVersion": "0.4.0", "name": POD_NETWORK_NAME, "plugins": [bridge, portmap]}, indent=1)


def up(cni_folder: Path, pod_addresses: Path) -> None:
    """Makes bridge, node addresses, kernel settings and the CNI configuration; leaves alone what is there."""
    if not Path(f"/sys/class/net/{BRIDGE}").exists():
        run(["ip", "link", "add", BRIDGE, "type", "bridge"], "making the pods' bridge")
    prefix_length = POD_NETWORK.partition("/")[2]
    run(["ip", "addr", "replace", f"{BRIDGE_IP}/{prefix_length}", "dev", BRIDGE], "addressing the pods' bridge")
    run(["ip", "link", "set", BRIDGE, "up"], "setting the pods' bridge up")
    for node in NODES:
        run(["ip", "addr", "replace", f"{node_ip(node)}/32", "dev", "lo"], f"giving {node} its address")
    for name, value in SYSCTLS.items():
        Path("/proc/sys", name).write_text(value)
    write_if_changed(cni_folder / "10-pods.conflist", cni_config(pod_addresses))


def down() -> None:
    """Removes every interface, address, namespace and rule that the cluster or its pods made."""
    _remove_pod_namespaces()
    for link in json.loads(attempt(["ip", "-j", "link", "show", "master", BRIDGE]) or "[]"):
        if link:
            attempt(["ip", "link", "del", link["ifname"]])
    attempt(["ip", "link", "del", BRIDGE])
    for node in NODES:
        attempt(["ip", "addr", "del", f"{node_ip(node)}/32", "dev", "lo"])
    for family in ("ip", "ip6"):
        attempt(["nft", "delete", "table", family, "kube-proxy"])
    for command in ("iptables", "ip6tables"):
        for table in ("filter", "nat", "mangle"):
            _remove_chains(command, table)
    _remove_cni_results()


def _remove_pod_namespaces() -> None:
    """containerd mounts each pod's network namespace at /run/netns/cni-*."""
    for namespace in Path("/run/netns").glob("cni-*"):
        attempt(["umount", "-l", namespace])
        namespace.unlink(missing_ok=True)


def _remove_cni_results() -> None:
    """The CNI remembers each attachment: to our network, and to the pod's own loopback, which names its namespace."""
    for result in CNI_RESULTS.glob(f"{POD_NETWORK_NAME}-*"):
        result.unlink(missing_ok=True)
    for result in CNI_RESULTS.glob("cni-loopback-*"):
        namespaces = NAMESPACES.findall(result.read_text(errors="replace"))
        if namespaces and not any(Path(namespace).exists() for namespace in namespaces):
            result.unlink(missing_ok=True)


def _remove_chains(command: str, table: str) -> None:
    """Removes chains that the kubelet, kube-proxy and the portmap plugin made, and the rules that lead to them."""
    saved = attempt([f"{command}-save", "-t", table]) or ""
    chains = CHAINS.findall(saved)
    if not chains:
        return
    deletions = [f"-D {rule}" for rule in RULES.findall(saved) if not rule.startswith(("KUBE-", "CNI-"))]
    lines = [
        f"*{table}",
        *deletions,
        *(f"-F {chain}" for chain in chains),
        *(f"-X {chain}" for chain in chains),
        "COMMIT",
    ]
    run(
        [f"{command}-restore", "--noflush"],
        f"removing chains from {command} {table}",
        input_text="\n".join(lines) + "\n",
    )
