"""The operator at work: watches, workers, comparison, metrics and probes in one process and one event loop."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import socket
import uuid

import kopf
from aiohttp import web
from kopf._core.engines.peering import Identity
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from headrace_operator import metrics, names
from headrace_operator.child_watch import ChildWatch
from headrace_operator.cluster import Cluster
from headrace_operator.connection import connect
from headrace_operator.decide import Defaults
from headrace_operator.engines import Engines
from headrace_operator.following import Following
from headrace_operator.handlers import build_registry, settings
from headrace_operator.inventory import Inventory
from headrace_operator.lease import Lease
from headrace_operator.preconditions import wait_until_usable
from headrace_operator.reconcile import Reconciler
from headrace_operator.resync import Resync
from headrace_operator.signal_board import SignalBoard
from headrace_operator.store import Store
from headrace_operator.workqueue import WorkQueue

logger = logging.getLogger(__name__)

NUM_WORKERS = 8


async def serve(args: argparse.Namespace) -> None:
    """Until SIGTERM or SIGINT, with the flags of `main.py`. Raises ClusterError without a kubeconfig or the lease."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with connect() as cluster, Engines() as engines:
        queue = WorkQueue()
        store = Store(queue.add)
        resync = Resync(cluster, store, queue, args.namespaces)
        lease = _lease(cluster, args.lease)
        health = Health(resync, lease)
        probes = await _serve_probes(args.metrics_port, health)
        try:
            if not await wait_until_usable(cluster, args.namespaces, stop):
                return
            if lease and not await lease.acquire(stop):
                return
            images = Defaults(args.engine_image, args.router_image)
            inventory = Inventory(cluster, queue.add)
            children = ChildWatch(cluster, store.mirror, args.namespaces)
            are_indexed = asyncio.Event()
            board = SignalBoard(engines, queue.add)
            following = Following(cluster, queue.add, args.namespaces)
            reconciler = Reconciler(
                store, cluster, inventory, images, engines=engines, board=board, following=following
            )
            await _run_until(
                stop,
                kopf.operator(
                    registry=build_registry(are_indexed.set),
                    settings=settings(),
                    indexers=store.indexers,
                    # kopf would ask for the user's name, which a container's user need not have.
                    identity=Identity(names.MANAGER),
                    standalone=True,
                    clusterwide=not args.namespaces,
                    namespaces=args.namespaces or (),
                    stop_flag=stop,
                    ready_flag=health.is_watching,
                ),
                resync.run(),
                *([lease.keep()] if lease else []),
                inventory.run(),
                board.run(),
                following.run(),
                children.run(),
                *(_work(queue, reconciler, are_indexed, children.is_listed) for _ in range(NUM_WORKERS)),
            )
        finally:
            queue.close()
            if lease:
                await lease.release()
            await probes.cleanup()


def _lease(cluster: Cluster, where: tuple[str, str] | None) -> Lease | None:
    """The lease of that namespace and name, which from now on decides whether the cluster may be written to."""
    if where is None:
        metrics.IS_LEADER.set(1)
        return None
    # A pod's host name is its name; the rest tells two processes of one pod apart.
    lease = Lease(cluster, *where, identity=f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}")
    cluster.seconds_to_write = lease.seconds_left
    return lease


async def _work(queue: WorkQueue, reconciler: Reconciler, *seen: asyncio.Event) -> None:
    """For ever, once all that exists has been seen: a pass before that would take what it misses for gone."""
    for event in seen:
        await event.wait()
    await queue.work(reconciler.reconcile, reconciler.rest_seconds)


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


class Health:
    """What the probes answer from."""

    def __init__(self, resync: Resync, lease: Lease | None) -> None:
        self._resync = resync
        self._lease = lease
        self.is_watching = asyncio.Event()

    def alive(self) -> tuple[bool, str]:
        """False once the watches are dead: a restart helps."""
        return (True, "ok") if self._resync.is_live else (False, "watches are dead")

    def ready(self) -> tuple[bool, str]:
        """Whether a roll-out of the operator may go on: this process works, or could take over at once."""
        if self._lease and self._lease.is_standing_by:
            return True, "standing by"
        return (True, "ok") if self.is_watching.is_set() else (False, "starting")


async def _serve_probes(port: int, health: Health) -> web.AppRunner:
    """/healthz: the watches are alive; /readyz: they have been started, or wait for the lease; /metrics: Prometheus."""

    def answer(state: tuple[bool, str]) -> web.Response:
        is_well, text = state
        return web.Response(text=f"{text}\n", status=200 if is_well else 503)

    async def healthz(_: web.Request) -> web.Response:
        return answer(health.alive())

    async def readyz(_: web.Request) -> web.Response:
        return answer(health.ready())

    async def show_metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", show_metrics)])
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
