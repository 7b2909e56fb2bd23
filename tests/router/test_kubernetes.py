"""List and watch of EndpointSlices against a fake API server: changes, expiry, outages, token rotation."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.router.fake_api_server import FakeApiServer, endpoint_slice, ready_pod
from tests.router.fakes import wait_until

from headrace_engine.router import kubernetes
from headrace_engine.router.fleet import Fleet
from headrace_engine.router.kubernetes import ApiServer, EndpointSliceSource, NotInCluster, _back_off


@dataclass
class Setting:
    server: FakeApiServer
    fleet: Fleet
    token: Path

    def ready(self) -> set[str]:
        return {group.name for group in self.fleet.groups() if group.endpoint.ready}

    async def becomes(self, *names: str) -> None:
        await wait_until(lambda: self.ready() == set(names))


@asynccontextmanager
async def following(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kubernetes, "MIN_CYCLE_SECONDS", 0.02)
    server = FakeApiServer()
    await server.start()
    await server.put(endpoint_slice("d", "dd-decode-leaders", [ready_pod("10.0.0.1", "d0")]))
    await server.put(endpoint_slice("p", "dd-prefill-leaders", [ready_pod("10.0.0.2", "p0")]))
    token = tmp_path / "token"
    token.write_text("first\n")
    fleet = Fleet()
    task = asyncio.create_task(EndpointSliceSource(ApiServer(server.url, token), "ns", "dd", fleet).run())
    try:
        setting = Setting(server, fleet, token)
        await setting.becomes("d0", "p0")
        await wait_until(lambda: server.open_watches == 1)
        yield setting
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await server.stop()


async def test_changes_arrive_as_events_without_another_list(tmp_path, monkeypatch):
    async with following(tmp_path, monkeypatch) as s:
        await s.server.put(
            endpoint_slice("p", "dd-prefill-leaders", [ready_pod("10.0.0.2", "p0"), ready_pod("10.0.0.3", "p1")])
        )
        await s.becomes("d0", "p0", "p1")
        await s.server.put(endpoint_slice("p", "dd-prefill-leaders", [ready_pod("10.0.0.2", "p0", ready=False)]))
        await s.becomes("d0")
        await s.server.delete("d")
        await s.becomes()
        assert s.server.num_lists == 1
        names = "dd-decode-leaders,dd-prefill-leaders,dd-unified-leaders"
        assert s.server.selectors == {f"kubernetes.io/service-name in ({names})"}


async def test_a_watch_that_ends_goes_on_from_the_last_bookmark(tmp_path, monkeypatch):
    async with following(tmp_path, monkeypatch) as s:
        await s.server.bookmark()
        version = s.server.version
        await s.server.end_watches()
        await wait_until(lambda: s.server.watched_from[-1] == version)
        await s.server.delete("p")
        await s.becomes("d0")
        assert s.server.num_lists == 1


@pytest.mark.parametrize("how", ["status 410", "error event 410"])
async def test_expired_history_leads_to_another_list(tmp_path, monkeypatch, how):
    async with following(tmp_path, monkeypatch) as s:
        del s.server.slices["p"]  # happened while nobody watched
        if how == "status 410":
            await s.server.compact()
        else:
            await s.server.error(410)
        await s.becomes("d0")
        assert s.server.num_lists == 2


async def test_an_error_event_of_another_kind_is_survived(tmp_path, monkeypatch):
    async with following(tmp_path, monkeypatch) as s:
        await s.server.error(500)
        await s.server.delete("p")
        await s.becomes("d0")


async def test_the_last_known_groups_stay_while_the_api_server_is_away(tmp_path, monkeypatch):
    async with following(tmp_path, monkeypatch) as s:
        await s.server.stop()
        await asyncio.sleep(0.3)
        assert s.ready() == {"d0", "p0"}
        s.server.num_failures = 2
        await s.server.start()
        await s.server.put(endpoint_slice("d", "dd-decode-leaders", [ready_pod("10.0.0.9", "d1")]))
        await s.becomes("d1", "p0")


async def test_an_object_that_cannot_be_read_does_not_end_the_watch_for_good(tmp_path, monkeypatch):
    async with following(tmp_path, monkeypatch) as s:
        broken = endpoint_slice("x", "dd-decode-leaders", [])
        broken["endpoints"] = ["nonsense"]
        await s.server.put(broken)
        await asyncio.sleep(0.1)
        assert s.ready() == {"d0", "p0"}
        await s.server.delete("x")
        await s.server.delete("p")
        await s.becomes("d0")


async def test_a_rotated_token_is_used_from_the_next_request_on(tmp_path, monkeypatch):
    async with following(tmp_path, monkeypatch) as s:
        assert set(s.server.tokens) == {"Bearer first"}
        s.token.write_text("second\n")
        await s.server.end_watches()
        await wait_until(lambda: s.server.tokens[-1] == "Bearer second")


def test_back_off_grows_to_a_cap_and_is_jittered():
    assert [_back_off(n, 1.0) for n in range(4)] == [0.5, 1.0, 2.0, 4.0]
    assert _back_off(3, 0.0) == 2.0
    assert _back_off(1000, 1.0) == kubernetes.MAX_BACK_OFF_SECONDS


def test_outside_a_pod_the_error_says_what_to_do(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(NotInCluster, match="outside a cluster use --static"):
        ApiServer.in_cluster()


@pytest.mark.parametrize(
    ("host", "url"), [("10.96.0.1", "https://10.96.0.1:443"), ("fd00::1", "https://[fd00::1]:443")]
)
def test_in_a_pod_the_address_comes_from_the_environment(tmp_path, monkeypatch, host, url):
    (tmp_path / "token").write_text("t")
    monkeypatch.setattr(kubernetes, "SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    assert ApiServer.in_cluster() == ApiServer(url, tmp_path / "token", tmp_path / "ca.crt")
