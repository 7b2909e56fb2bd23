"""What commands about one deployment of a cluster share: the connection, the deployment, errors in one line."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from headrace_operator import names

if TYPE_CHECKING:
    from headrace_operator.cluster import Cluster

# Given the flags, the cluster and the deployment as stored; returns the exit code.
Work = Callable[[argparse.Namespace, "Cluster", dict[str, Any]], Awaitable[int]]


def add_deployment(parser: argparse.ArgumentParser) -> None:
    """The flags that name the deployment."""
    parser.add_argument("name", help=f"name of the {names.KIND}")
    parser.add_argument("-n", "--namespace", help="default: that of the kubeconfig's context, or default")
    add_context(parser)


def add_context(parser: argparse.ArgumentParser) -> None:
    """The flag that names the cluster."""
    parser.add_argument("--context", metavar="NAME", help="of the kubeconfig (default: its current one)")


def with_deployment(args: argparse.Namespace, work: Work) -> int:
    """The exit code of `work`; 1, and why on standard error, without the cluster or the deployment."""
    from headrace_operator.cluster import ClusterError  # a cluster's client takes long to import

    try:
        return asyncio.run(_run(args, work))
    except (ClusterError, OSError) as error:
        print(f"headrace: {error}", file=sys.stderr)
        return 1


async def _run(args: argparse.Namespace, work: Work) -> int:
    from headrace_operator.connection import connect

    async with connect(args.context) as cluster:
        args.namespace = args.namespace or cluster.namespace
        body = await cluster.get(names.KIND, args.namespace, args.name)
        if body is None:
            print(f"headrace: there is no {names.KIND} {args.name} in namespace {args.namespace}", file=sys.stderr)
            return 1
        return await work(args, cluster, body)
