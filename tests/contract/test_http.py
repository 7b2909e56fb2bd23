"""What others ask of engines and routers is there: probes, routes, fields of /state, metrics."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import Counter, Gauge, Histogram
from tests.contract.rendered import ROOT, container, deployments, engine_pods, router_pod_spec

from headrace_engine.chat.formats import V4Format
from headrace_engine.config import EngineConfig
from headrace_engine.messages import Hello, RankState
from headrace_engine.router.app import Router
from headrace_engine.router.config import Limits
from headrace_engine.server.follower import follower_app
from headrace_engine.server.handle import RankView
from headrace_engine.server.http import Server
from headrace_engine.server.recent import BOUNDS_SECONDS
from headrace_operator import metrics, names
from headrace_operator.engines import load_of
from headrace_operator.groups import Load
from headrace_operator.signals import measured, sample_of

CONFIG = EngineConfig(model="x", served_model_name="tiny")
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def ready_rank() -> RankView:
    view = RankView(0)
    view.hello = Hello(0, "incarnation", "fingerprint", 64, 10)
    view.state = RankState(**dict.fromkeys(RankState.__struct_fields__, 0))
    return view


def leader_app() -> web.Application:
    """The leader's real routes and metrics, over a group of one rank that has said Hello."""
    frontend = SimpleNamespace(
        ranks=[ready_rank()], is_ready=True, is_draining=False, num_in_flight=0, fingerprint="fingerprint",
        max_model_len=64,
    )  # fmt: skip
    tokenizer = SimpleNamespace(file=Path("tokenizer.json"))  # nothing is tokenized
    server = Server(CONFIG, frontend, tokenizer, vocab_size=16, chat_format=V4Format())  # type: ignore[arg-type]
    return server.app()


async def router_app() -> web.Application:
    """A router's real routes and metrics; it has no engine to talk to."""
    router = Router("tiny", Limits())
    await router.engines.close()
    return router._application()


def routes(app: web.Application) -> set[str]:
    """`METHOD path` of every route."""
    found = {(route.method, route.resource.canonical) for route in app.router.routes() if route.resource}
    return {f"{method} {path}" for method, path in found if method != "HEAD"}


def probe_paths(container: dict[str, Any]) -> set[str]:
    return {f"GET {container[probe]['httpGet']['path']}" for probe in PROBES if probe in container}


async def test_probes_of_engine_pods_are_routes_of_leaders_and_followers() -> None:
    for pod in engine_pods():
        assert probe_paths(pod.container) == {"GET /ready", "GET /health"}
        assert probe_paths(pod.container) <= routes(leader_app())
        assert probe_paths(pod.container) <= routes(follower_app(CONFIG, []))
        ports = {port["name"]: port["containerPort"] for port in pod.container["ports"]}
        assert all(pod.container[probe]["httpGet"]["port"] in ports for probe in PROBES)
        assert ports["http"] == int(pod.argv[pod.argv.index("--port") + 1])


async def test_probes_of_the_router_are_its_routes() -> None:
    spec = router_pod_spec(deployments()[0])
    assert probe_paths(container(spec, names.CONTAINER_ROUTER)) <= routes(await router_app())


def architecture_routes(server: str) -> set[str]:
    """The routes that docs/architecture.md lists for the engines or for the router."""
    text = (ROOT / "docs/architecture.md").read_text()
    section = text.split("## HTTP between router and engines")[1].split("The router never")[0]
    of_engine, of_router = section.split("The router has")
    paragraph = of_engine if server == "engine" else of_router
    return {quoted.split(" ")[-1] for quoted in re.findall(r"`((?:POST )?/[^`]*)`", paragraph)}


async def test_the_leader_has_the_documented_routes_and_no_other() -> None:
    assert {route.split(" ")[1] for route in routes(leader_app())} == architecture_routes("engine")


async def test_the_router_has_the_documented_routes_and_no_other() -> None:
    assert {route.split(" ")[1] for route in routes(await router_app())} == architecture_routes("router")


# --- /state ---


def state_fields_used(path: Path) -> set[str]:
    """Fields of a rank's state that a file reads, as `rank["..."]`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "rank":
            key = node.slice
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                found.add(key.value)
    return found


READERS = [path for folder in ("e2e", "tests/pd", "tests/bench") for path in sorted((ROOT / folder).glob("*.py"))]


async def test_every_field_of_state_that_scenarios_read_is_there() -> None:
    async with TestClient(TestServer(leader_app())) as client:
        state = await (await client.get("/state")).json()
    used = {field for path in READERS for field in state_fields_used(path)}
    assert {"num_quarantined_blocks", "num_running"} <= used  # the search finds something
    assert used <= set(state["ranks"][0])


async def test_the_operator_reads_from_state_what_a_group_has_under_way() -> None:
    async with TestClient(TestServer(leader_app())) as client:
        state = await (await client.get("/state")).json()
    state["in_flight"] = 3
    state["ranks"][0] |= {"num_pushing": 4, "num_waiting_for_kv": 5}  # they are there already
    assert {"num_pushing", "num_waiting_for_kv"} <= set(RankState.__struct_fields__)
    assert load_of(state) == Load(3, 9)


async def test_the_operator_reads_from_state_how_a_group_is() -> None:
    async with TestClient(TestServer(leader_app())) as client:
        state = await (await client.get("/state")).json()
    state["ranks"][0] |= {"live_requests": 5, "num_running": 4, "num_waiting_for_kv": 1, "num_queued_tokens": 700}
    sample = sample_of(state, now=9.0)
    assert sample is not None
    assert (sample.num_ranks, sample.num_blocks, sample.window_seconds) == (1, 10, 30)
    assert (sample.num_requests, sample.num_running, sample.num_waiting_for_kv) == (5, 4, 1)
    assert (sample.num_queued_tokens, sample.bounds) == (700, BOUNDS_SECONDS)
    assert measured([sample]) is not None


# --- metrics ---


async def exposed(app: web.Application) -> str:
    async with TestClient(TestServer(app)) as client:
        response = await client.get("/metrics")
        assert response.status == 200
        return await response.text()


def families(text: str) -> set[str]:
    return {line.split(" ")[2] for line in text.splitlines() if line.startswith("# TYPE ")}


def documented_metrics() -> set[str]:
    """Names of metrics in any document, without the endings that Prometheus adds to a family's name."""
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "charts/headrace/values.yaml"]
    text = "\n".join(path.read_text() for path in documents)
    return set(re.findall(r"`((?:vllm:|headrace:|headrace_router_|headrace_operator_)\w+)", text))


@pytest.fixture(scope="module")
def operator_families() -> set[str]:
    found = [
        value
        for value in vars(metrics).values()
        if isinstance(value, Counter | Gauge | Histogram | metrics.Deployments)
    ]
    return {family.name for metric in found for family in metric.describe()}


async def test_documented_metrics_are_exposed(operator_families: set[str]) -> None:
    engine = families(await exposed(leader_app()))
    router = families(await exposed(await router_app()))
    known = engine | router | operator_families
    stem = re.compile(r"_(total|bucket|sum|count)$")
    stems = {stem.sub("", name) for name in known}
    assert {stem.sub("", name) for name in documented_metrics()} <= stems


def test_every_metric_of_the_operator_is_documented(operator_families: set[str]) -> None:
    stem = re.compile(r"_(total|bucket|sum|count)$")
    documented = {stem.sub("", name) for name in documented_metrics()}
    assert {stem.sub("", name) for name in operator_families} <= documented


async def test_metrics_of_each_program_have_its_prefix(operator_families: set[str]) -> None:
    own = families(await exposed(leader_app())) | families(await exposed(follower_app(CONFIG, [])))
    assert {name.split(":")[0] for name in own} == {"vllm", "headrace"}
    assert all(name.startswith("headrace_router_") for name in families(await exposed(await router_app())))
    assert all(name.startswith("headrace_operator_") for name in operator_families)


async def test_names_that_vllm_dashboards_read_are_there() -> None:
    wanted = {
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
        "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds", "vllm:e2e_request_latency_seconds",
        "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total",
    }  # fmt: skip
    assert wanted <= families(await exposed(leader_app()))
