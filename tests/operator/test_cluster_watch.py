"""Lists in pages and watches, against a small HTTP server that answers as the API server does."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from kubernetes.aio import client

from headrace_operator.cluster import Cluster, ClusterError, Refused, WatchExpired
from headrace_operator.watching import changes, pages

LONG = "x" * 300_000  # longer than any buffer of the HTTP client


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    app = web.Application()
    app.add_routes([web.get("/api/v1/nodes", nodes), web.get("/api/v1/pods", pods)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    configuration = client.Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
    async with client.ApiClient(configuration) as api:
        yield Cluster(api)
    await runner.cleanup()


async def nodes(request: web.Request) -> web.StreamResponse:
    """Three nodes in pages of two; a watch from version 7 tells of one and then fails, from any other it is refused."""
    if request.query.get("watch") != "true":
        start = int(request.query.get("continue", "0"))
        items = [{"metadata": {"name": f"n{i}"}} for i in range(3)][start : start + 2]
        metadata = {"resourceVersion": "7", **({"continue": str(start + 2)} if start == 0 else {})}
        return web.json_response({"metadata": metadata, "items": items})
    if request.query["resourceVersion"] != "7":
        return web.json_response({"message": "too old resource version"}, status=410)
    response = web.StreamResponse()
    await response.prepare(request)
    for event in (
        {"type": "ADDED", "object": {"metadata": {"name": "n4", "annotations": {"long": LONG}}}},
        {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}},
        {"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}},
    ):
        await response.write(json.dumps(event).encode() + b"\n")
    return response


async def pods(request: web.Request) -> web.Response:
    return web.json_response({"message": "pods is forbidden"}, status=403)


async def test_a_long_list_comes_in_pages(cluster: Cluster) -> None:
    seen = [
        ([body["metadata"]["name"] for body in bodies], version) async for bodies, version in pages(cluster, "Node")
    ]
    assert seen == [(["n0", "n1"], "7"), (["n2"], "7")]


async def test_a_watch_passes_on_objects_of_any_length_and_says_when_it_lost_the_thread(cluster: Cluster) -> None:
    watch = changes(cluster, "Node", "7")
    change, body = await anext(watch)
    assert (change, body["metadata"]["annotations"]["long"]) == ("ADDED", LONG)
    assert (await anext(watch))[0] == "BOOKMARK"
    with pytest.raises(WatchExpired, match="too old"):
        await anext(watch)


async def test_a_watch_from_too_long_ago_must_begin_anew(cluster: Cluster) -> None:
    with pytest.raises(WatchExpired, match="too old"):
        await anext(changes(cluster, "Node", "1"))


async def test_a_missing_right_is_told_apart(cluster: Cluster) -> None:
    with pytest.raises(Refused, match="pods is forbidden"):
        await anext(pages(cluster, "Pod"))
    with pytest.raises(Refused, match="pods is forbidden"):
        await anext(changes(cluster, "Pod", "7"))


async def test_it_is_told_that_the_api_server_answers_again(unused_tcp_port: int) -> None:
    configuration = client.Configuration(host=f"http://127.0.0.1:{unused_tcp_port}")
    async with client.ApiClient(configuration) as api:
        cluster = Cluster(api)
        with pytest.raises(ClusterError):
            await cluster.get_node("n0")
        assert not cluster.has_returned.is_set()
        app = web.Application()
        app.add_routes([web.get("/api/v1/nodes/n0", a_node)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", unused_tcp_port).start()
        await cluster.get_node("n0")
        assert cluster.has_returned.is_set()
        await runner.cleanup()


async def a_node(request: web.Request) -> web.Response:
    return web.json_response({"metadata": {"name": "n0"}})
