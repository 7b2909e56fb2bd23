"""The only file that talks to engines: what a group's leader has in flight and how it is, over HTTP.

Nothing depends on the answers but the moment of a deletion and moves between roles: an engine that does not answer in
time is not waited for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp

from headrace_operator.groups import GroupKey, Load
from headrace_operator.signals import Sample, sample_of

logger = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 2.0
_MAX_PARALLEL = 32
_MAX_PARALLEL_SAMPLES = 16  # so that those who drain a group need not wait for those who look around
_MAX_STATE_BYTES = 4 << 20  # a thousand ranks take half a megabyte


class Engines:
    """Use as an async context manager; one for the process. `addresses`: host:port of a group's leader."""

    async def __aenter__(self) -> Engines:
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
        connector = aiohttp.TCPConnector(limit=_MAX_PARALLEL, force_close=True)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector, trust_env=False)
        self._sampling = asyncio.Semaphore(_MAX_PARALLEL_SAMPLES)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def loads(self, addresses: Mapping[GroupKey, str]) -> dict[GroupKey, Load]:
        """What each group has in flight; those that do not answer are left out."""
        answers = await asyncio.gather(*(self._load(address) for address in addresses.values()))
        return {key: load for key, load in zip(addresses, answers, strict=True) if load is not None}

    async def samples(self, addresses: Mapping[GroupKey, str], clock: Callable[[], float]) -> dict[GroupKey, Sample]:
        """How each group is; those that do not answer are left out."""
        answers = await asyncio.gather(*(self._sample(address, clock) for address in addresses.values()))
        return {key: sample for key, sample in zip(addresses, answers, strict=True) if sample is not None}

    async def hurry(self, address: str) -> None:
        """Have the engine end what it still has, with errors, as soon as it is told to end."""
        try:
            async with self._session.post(f"http://{address}/drain", params={"seconds": "0"}) as response:
                await response.release()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            logger.warning("%s: POST /drain: %s", address, error or type(error).__name__)

    async def _load(self, address: str) -> Load | None:
        return load_of(await self._state(address))

    async def _sample(self, address: str, clock: Callable[[], float]) -> Sample | None:
        async with self._sampling:
            return sample_of(await self._state(address), clock())

    async def _state(self, address: str) -> Any:
        """An engine's /state; None without a good answer."""
        try:
            async with self._session.get(f"http://{address}/state") as response:
                if response.status != 200 or (response.content_length or 0) > _MAX_STATE_BYTES:
                    return None
                return await response.json()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            logger.info("%s: GET /state: %s", address, error or type(error).__name__)
            return None


def load_of(state: Any) -> Load | None:
    """What an engine's /state says; None if it is not what an engine says."""
    try:
        ranks = state["ranks"]
        return Load(
            num_requests=int(state["in_flight"]),
            num_pushes=sum(int(rank.get("num_pushing", 0)) + int(rank.get("num_waiting_for_kv", 0)) for rank in ranks),
        )
    except (TypeError, KeyError, ValueError, AttributeError):
        return None
