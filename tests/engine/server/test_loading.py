"""Progress of loading: from a rank's line to /state and /metrics of leaders and followers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, cast

import pytest
from aiohttp.test_utils import TestClient, TestServer
from tests.engine.server.conftest import Harness

from headrace_engine.config import EngineConfig
from headrace_engine.pod import RankProcess
from headrace_engine.server.follower import follower_app
from headrace_engine.server.loading import Loading


@dataclass
class LocalRank:
    rank: int
    is_ready: bool
    loading: Loading | None


@pytest.mark.parametrize("loading", [Loading(0, 0), Loading(3, 17_000_000_000)])
def test_a_line_round_trips(loading: Loading) -> None:
    assert Loading.from_line(loading.to_line()) == loading


@pytest.mark.parametrize("line", [b"ready\n", b"", b"loaded 3 4"])
def test_another_line_is_not_taken_for_progress(line: bytes) -> None:
    assert Loading.from_line(line) is None


async def test_a_pod_hears_of_progress_and_then_that_the_rank_is_ready() -> None:
    status, heard = asyncio.StreamReader(), []
    status.feed_data(b"loaded 0 9\nloaded 9 9\n")
    rank = RankProcess(3, cast(Any, None), status, lambda number, loading: heard.append((number, loading)))
    await asyncio.sleep(0)
    assert (rank.loading, rank.is_ready) == (Loading(9, 9), False)
    status.feed_data(b"ready\n")
    status.feed_eof()
    await asyncio.wait_for(rank.wait_ready(), 5)
    assert heard == [(3, Loading(0, 9)), (3, Loading(9, 9))]


async def test_a_follower_shows_its_ranks_progress() -> None:
    config = EngineConfig(model="x", served_model_name="toy", data=2, data_local=2)
    ranks = [LocalRank(0, False, Loading(5, 20)), LocalRank(1, False, None)]
    async with TestClient(TestServer(follower_app(config, ranks))) as client:
        state = await (await client.get("/state")).json()
        assert state["ranks"] == [
            {"rank": 0, "ready": False, "weights_loaded_bytes": 5, "weights_bytes": 20},
            {"rank": 1, "ready": False},
        ]
        metrics = await (await client.get("/metrics")).text()
    assert 'headrace:weights_loaded_bytes{engine="0",model_name="toy"} 5.0' in metrics
    assert 'headrace:weights_bytes{engine="0",model_name="toy"} 20.0' in metrics
    assert 'engine="1"' not in metrics


async def test_the_leader_shows_its_ranks_progress(engine: Harness) -> None:
    engine.frontend.ranks[0].loading = Loading(5, 20)
    state = await (await engine.client.get("/state")).json()
    assert (state["ranks"][0]["weights_loaded_bytes"], state["ranks"][0]["weights_bytes"]) == (5, 20)
    metrics = await (await engine.client.get("/metrics")).text()
    assert 'headrace:weights_loaded_bytes{engine="0",model_name="toy"} 5.0' in metrics
    assert 'headrace:weights_bytes{engine="0",model_name="toy"} 20.0' in metrics
