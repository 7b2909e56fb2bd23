"""HTTP of a pod that is not the leader: probes and a little state, no inference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from headrace_engine.config import EngineConfig
from headrace_engine.server.loading import GAUGES, Loading
from headrace_engine.server.metrics import CONTENT_TYPE


class LocalRank(Protocol):
    """What a follower shows of its ranks."""

    rank: int

    @property
    def is_ready(self) -> bool: ...

    @property
    def loading(self) -> Loading | None: ...


def follower_app(config: EngineConfig, ranks: Sequence[LocalRank]) -> web.Application:
    """`ranks` is this pod's own, and may still grow."""
    registry = CollectorRegistry()
    ready_gauge = Gauge("headrace:ready", "1 if all ranks of this pod are ready.", ("model_name",), registry=registry)
    loading_gauges = [
        (Gauge(name, text, ("model_name", "engine"), registry=registry), field) for name, text, field in GAUGES
    ]

    def is_ready() -> bool:
        return len(ranks) == config.data_local and all(rank.is_ready for rank in ranks)

    async def health(_: web.Request) -> web.Response:
        return _json({"status": "alive"})

    async def ready(_: web.Request) -> web.Response:
        return _json({"status": "ready" if is_ready() else "not ready"}, 200 if is_ready() else 503)

    async def state(_: web.Request) -> web.Response:
        return _json(
            {
                "model": config.served_model_name,
                "role": config.role.value,
                "pod_index": config.pod_index,
                "ready": is_ready(),
                "ranks": [
                    {"rank": rank.rank, "ready": rank.is_ready, **(rank.loading.state() if rank.loading else {})}
                    for rank in ranks
                ],
            }
        )

    async def metrics(_: web.Request) -> web.Response:
        ready_gauge.labels(config.served_model_name).set(int(is_ready()))
        for rank in ranks:
            for gauge, field in loading_gauges if rank.loading else ():
                gauge.labels(config.served_model_name, str(rank.rank)).set(getattr(rank.loading, field))
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application()
    app.add_routes(
        [web.get("/health", health), web.get("/ready", ready), web.get("/state", state), web.get("/metrics", metrics)]
    )
    return app


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
