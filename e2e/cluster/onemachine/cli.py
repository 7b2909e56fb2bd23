"""The command line."""

from __future__ import annotations

import argparse
import json
import signal
import sys

from . import binaries, images, kueue
from .addresses import NODES
from .cluster import Cluster
from .console import ClusterError, Progress
from .layout import Layout, default_cache
from .ownership import command_lock

DESCRIPTION = """\
A real Kubernetes on this machine: API server, controllers, scheduler, DNS, Service proxy, and three nodes with a
containerd and a kubelet each. Debian, root, about 14 GiB of disk for the first build.

  python3 e2e/cluster/cluster.py up            the first time builds everything (10 minutes), later takes seconds
  export KUBECONFIG=$(python3 e2e/cluster/cluster.py kubeconfig)
  python3 e2e/cluster/cluster.py images        base, torch, operator and engine images, into a registry on loopback
  python3 e2e/cluster/cluster.py down          leaves nothing on the machine but the cache folder
"""
EPILOG = """\
Everything is kept below $HEADRACE_CACHE (default ~/.cache/headrace): binaries, images, the cluster's state and logs.
One cluster fits on a machine: its addresses are fixed. Results go to standard output, progress to standard error.
"""


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        "cluster.py", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    bring_up = commands.add_parser("up", help="start the cluster, or what of it is not running; repeat as you like")
    bring_up.add_argument(
        "--images", action="store_true", help="at the same time make the images that changed; print their names as JSON"
    )
    down = commands.add_parser("down", help="stop it and remove every trace but the cache folder")
    down.add_argument("--wipe", action="store_true", help="also remove its state: etcd, certificates, the nodes' pods")
    commands.add_parser("status", help="print as JSON what runs; exits with 1 unless everything does")
    commands.add_parser("kubeconfig", help="print the path of the administrator's kubeconfig")
    commands.add_parser("kubectl-path", help="print the path of kubectl")
    commands.add_parser("helm-path", help="print the path of helm, fetched if it is not there")
    make_images = commands.add_parser("images", help="make the images that changed; print their names")
    make_images.add_argument("--format", choices=("json", "env"), default="json", help="default: json")
    node = commands.add_parser("node", help="what may happen to a machine")
    actions = {
        "kill": "a power cut: every process of the node dies at once",
        "freeze": "a hang: every process stops, connections stay open",
        "thaw": "the end of a hang",
        "start": "start a killed node and wait until it is Ready",
    }
    node_actions = node.add_subparsers(dest="action", required=True, metavar="ACTION")
    for action, text in actions.items():
        node_actions.add_parser(action, help=text).add_argument("node", choices=NODES)
    kwok = commands.add_parser("kwok", help="pretended nodes: racks of 18 machines with 4 GPUs each")
    kwok_actions = kwok.add_subparsers(dest="action", required=True, metavar="ACTION")
    up = kwok_actions.add_parser("up", help="make exactly N pretended nodes (builds kwok the first time)")
    up.add_argument("count", nargs="?", type=int, default=72, metavar="N", help="default: 72, four racks")
    kwok_actions.add_parser("down", help="remove them")
    commands.add_parser("kueue", help="make Kueue's image (builds it the first time); print image and chart as JSON")
    return top


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    layout, progress = Layout(default_cache()), Progress()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was started is ended
    try:
        return _dispatch(arguments, Cluster(layout, progress), progress)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command again goes on from here", file=sys.stderr)
        return 130


def _dispatch(arguments: argparse.Namespace, cluster: Cluster, progress: Progress) -> int:
    match arguments.command:
        case "status":
            status = cluster.status()
            print(json.dumps(status, indent=1))
            return 0 if status["running"] else 1
        case "kubeconfig":
            print(cluster.layout.kubeconfig)
        case "kubectl-path":
            print(cluster.binaries / "kubectl")
        case "helm-path":
            print(binaries.ensure_helm(cluster.layout, progress))
        case _:
            if (arguments.command, getattr(arguments, "action", None)) == ("kwok", "up"):
                binaries.ensure_kwok(cluster.layout, progress)  # minutes, in which others may use the cluster
            if arguments.command == "kueue":
                kueue.ensure(cluster.layout, progress)  # minutes as well
            with command_lock(progress):
                _change(arguments, cluster)
    return 0


def _change(arguments: argparse.Namespace, cluster: Cluster) -> None:
    match arguments.command, getattr(arguments, "action", None):
        case "up", _ if arguments.images:
            print(json.dumps(cluster.up_with_images()))
        case "up", _:
            cluster.up()
            print(cluster.layout.kubeconfig)
        case "down", _:
            cluster.down(wipe=arguments.wipe)
        case "images", _:
            names = cluster.make_images()
            print(json.dumps(names) if arguments.format == "json" else images.as_environment(names))
        case "kueue", _:
            print(json.dumps(cluster.kueue()))
        case "node", "kill":
            cluster.kill_node(arguments.node)
        case "node", "freeze" | "thaw":
            cluster.set_node_frozen(arguments.node, arguments.action == "freeze")
        case "node", "start":
            cluster.start_node(arguments.node)
        case "kwok", "up":
            cluster.kwok_up(arguments.count)
        case "kwok", "down":
            cluster.kwok_down()
