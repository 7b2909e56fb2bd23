"""The operator at work: watches, workers, comparison, metrics and probes in one process and one event loop."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import socket
from collections.abc import Sequence

import kopf
from aiohttp import web
from kopf._core.engines.peering import Identity
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from headrace_operator import names
from headrace_operator.cluster import CHILD_KINDS, RESOURCES, Cluster, connect
from headrace_operator.decide import Defaults
from headrace_operator.handlers import build_registry, settings
from headrace_operator.reconcile import Reconciler
from headrace_operator.resync import Resync
from headrace_operator.store import Store
from headrace_operator.workqueue import WorkQueue

logger = logging.getLogger(__name__)

NUM_WORKERS = 8
_CRD_POLL_SECONDS = 2.0


async def serve(args: argparse.Namespace) -> None:
    """Until SIGTERM or SIGINT, with the flags of `main.py`. Raises ClusterError if there is no cluster."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    queue = WorkQueue()
    store = Store(CHILD_KINDS)
    async with connect() as cluster:
        resync = Resync(cluster, store, queue, args.namespaces)
        ready = asyncio.Event()
        probes = await _serve_probes(args.metrics_port, resync, ready)
        try:
            if not await _wait_for_crds(cluster, args.namespaces, stop):
                return
            reconciler = Reconciler(store, cluster, Defaults(args.engine_image, args.router_image))
            await _run_until(
                stop,
                kopf.operator(
                    registry=build_registry(queue),
                    settings=settings(),
                    indexers=store.indexers,
                    # kopf would ask for the user's name, which a container's user need not have.
                    identity=Identity(names.MANAGER),
                    standalone=True,
                    clusterwide=not args.namespaces,
                    namespaces=args.namespaces or (),
                    stop_flag=stop,
                    ready_flag=ready,
                ),
                resync.run(),
                *(queue.work(reconciler.reconcile) for _ in range(NUM_WORKERS)),
            )
        finally:
            queue.close()
            await probes.cleanup()


async def _run_until(stop: asyncio.Event, *coroutines: object) -> None:
    """Run all until `stop` is set or one of them ends; then cancel the rest. A failure of one is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]  # type: ignore[call-overload]
    tasks.append(asyncio.ensure_future(stop.wait()))
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    stop.set()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        if not task.cancelled() and (error := task.exception()):
            raise error


async def _wait_for_crds(cluster: Cluster, namespaces: Sequence[str] | None, stop: asyncio.Event) -> bool:
    """Wait until the API server knows our resources; False if told to stop first."""
    told = False
    while not stop.is_set():
        missing = [
            RESOURCES[kind][2]
            for kind in (names.KIND, names.SCALER_KIND)
            if not await cluster.is_served(kind, namespaces[0] if namespaces else None)
        ]
        if not missing:
            return True
        if not told:
            listed = ", ".join(f"{plural}.{names.GROUP}" for plural in missing)
            logger.warning("waiting for these CustomResourceDefinitions to be installed (folder crds): %s", listed)
            told = True
        try:
            await asyncio.wait_for(stop.wait(), _CRD_POLL_SECONDS)
        except TimeoutError:
            continue
    return False


async def _serve_probes(port: int, resync: Resync, ready: asyncio.Event) -> web.AppRunner:
    """/healthz: the watches are alive; /readyz: they have been started; /metrics: Prometheus text."""

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n") if resync.is_live else web.Response(text="watches are dead\n", status=503)

    async def readyz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n") if ready.is_set() else web.Response(text="starting\n", status=503)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    # One socket for IPv4 and IPv6: kubelets of either kind of cluster can probe it.
    if socket.has_dualstack_ipv6():
        listener = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        listener = socket.create_server(("", port))
    await web.SockSite(runner, listener).start()
    logger.info("metrics and probes on port %s", runner.addresses[0][1])
    return runner
