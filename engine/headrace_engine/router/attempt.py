"""One attempt at a request: both legs on a pair of groups, or the whole of it on a unified group.

Decode comes first, because it says in its ticket where the KV must go. The prefill leg then runs while the decode leg
waits; the client gets nothing until decode has something for it, and decode can only have that once all KV is there.
A request with several prompts has a ticket and a prefill leg for each; one that fails ends the attempt.
Every way out of an attempt closes both legs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Set as AbstractSet

import aiohttp
from aiohttp import web

from headrace_engine.core import Leg, Role
from headrace_engine.router.body import splice_ticket
from headrace_engine.router.engines import Engines, refusal
from headrace_engine.router.exchange import ClientGone, Exchange
from headrace_engine.router.fleet import Fleet, NoGroup
from headrace_engine.router.group import Charge
from headrace_engine.router.legs import EVENT_STREAM, DecodeLeg, FingerprintRefused, run_prefill_leg
from headrace_engine.router.metrics import Metrics
from headrace_engine.router.replies import LegFailure, Reply, error_code, error_reply
from headrace_engine.router.sse import EventReader, StreamBroken, ends_properly

# Decode often hears of a failed prefill before the router does. Prefill's own answer says more and tells who is at
# fault, so it gets this long to arrive.
BLAME_SECONDS = 0.5
KV_TRANSFER_FAILED = "kv_transfer_failed"  # decode's code for KV that does not come


class Attempt:
    """State of one attempt; `used` are the groups that took part."""

    def __init__(self, fleet: Fleet, engines: Engines, metrics: Metrics, exchange: Exchange, number: int) -> None:
        self._fleet = fleet
        self._engines = engines
        self._metrics = metrics
        self._exchange = exchange
        self._number = number
        self.used: set[str] = set()
        self._prefilling: list[Charge] = []  # of prefill legs that have not answered

    async def run(self, tried: AbstractSet[str], avoid: AbstractSet[str]) -> web.StreamResponse:
        """The answer to the client, begun or complete. Raises LegFailure and NoGroup, only before the first byte."""
        if self._fleet.is_unified:
            return await self._run_whole(tried)
        self._fleet.check(Role.PREFILL, tried=tried)  # no ticket for a request that nobody can prefill
        patience_seconds = self._engines.limits.group_seconds
        with await self._fleet.dispatch_soon(Role.DECODE, patience_seconds, tried=tried, avoid=avoid) as charge:
            self.used.add(charge.group.url)
            leg = await self._open_decode_leg(charge)
            try:
                if leg.num_tickets:
                    return await self._join(leg, charge, tried, avoid)
                return await self._answer(await leg.first(), leg, charge)
            finally:
                leg.close()

    async def _open_decode_leg(self, charge: Charge) -> DecodeLeg:
        exchange = self._exchange
        started_at = time.monotonic()
        leg_headers = exchange.leg_headers(Leg.DECODE, self._number)
        leg = await DecodeLeg.open(self._engines, charge, exchange.request.path, leg_headers, exchange.body)
        self._metrics.leg_seconds.labels("ticket").observe(time.monotonic() - started_at)
        return leg

    async def _join(
        self, leg: DecodeLeg, decode: Charge, tried: AbstractSet[str], avoid: AbstractSet[str]
    ) -> web.StreamResponse:
        """Run the prefill legs beside the decode leg until the client has its answer."""
        prefill = asyncio.create_task(self._prefill_all(leg, decode, tried, avoid))
        first = asyncio.create_task(leg.first())
        try:
            return await self._answer(await self._first_answer(prefill, first, decode), leg, decode)
        finally:
            await _cancel(prefill, first)

    async def _answer(self, first: Reply | bytes, leg: DecodeLeg, decode: Charge) -> web.StreamResponse:
        """first: what decode said first after the ticket."""
        if isinstance(first, bytes):
            return await self._stream(first, leg.reader, decode)
        response = await self._exchange.reply(first)
        await leg.finish()
        return response

    async def _first_answer(
        self, prefill: asyncio.Task[None], first: asyncio.Task[Reply | bytes], decode: Charge
    ) -> Reply | bytes:
        """Decode's first word after the ticket. Raises the LegFailure that ends the attempt."""
        await asyncio.wait((prefill, first), return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            prefill.result()
            # All KV is there. A stream must now begin; a whole answer takes as long as it has tokens.
            silence_seconds = self._engines.limits.idle_seconds if self._exchange.wants_stream else None
            async with self._engines.faults(decode, Role.DECODE, silence_seconds):
                return await first
        failure = first.exception()
        if isinstance(failure, LegFailure) and failure.cause == "reported" and failure.retriable:
            await asyncio.wait((prefill,), timeout=BLAME_SECONDS)
            if prefill.done():
                prefill.result()
            elif error_code(failure.reply.body) == KV_TRANSFER_FAILED:
                raise self._silent_prefill(failure) from failure
        return first.result()

    def _silent_prefill(self, reported: LegFailure) -> LegFailure:
        """Decode got no KV, and prefill has said nothing: a frozen group, or a dead node that resets no connection."""
        if len({charge.group.url for charge in self._prefilling}) != 1:
            return reported  # of several that have not answered any may be the one
        charge = self._prefilling[0]
        charge.unreachable(time.monotonic())
        return LegFailure(Role.PREFILL, charge.group.url, "deadline", reported.reply, retriable=True)

    async def _prefill_all(
        self, leg: DecodeLeg, decode: Charge, tried: AbstractSet[str], avoid: AbstractSet[str]
    ) -> None:
        """A prefill leg for each ticket, once decode hands it out. The first that fails ends the others."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(leg.num_tickets):
                    ticket = await leg.tickets.get()
                    group.create_task(self._prefill(leg, ticket, decode, tried, avoid))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _prefill(
        self, leg: DecodeLeg, ticket: bytes, decode: Charge, tried: AbstractSet[str], avoid: AbstractSet[str]
    ) -> None:
        """Have a prefill group push. One whose cache has another layout refuses the ticket unused; then the next."""
        exchange = self._exchange
        chunks = splice_ticket(exchange.body, ticket)
        leg_headers = exchange.leg_headers(Leg.PREFILL, self._number)
        patience_seconds = self._engines.limits.group_seconds
        started_at = time.monotonic()
        while True:
            try:
                charge = await self._fleet.dispatch_soon(
                    Role.PREFILL, patience_seconds, tried=tried, avoid=avoid, fingerprint=leg.fingerprint
                )
            except NoGroup as error:
                reply = error_reply(503, str(error), code="no_group", retry_after_seconds=error.retry_after_seconds)
                raise LegFailure(Role.DECODE, decode.group.url, "unpaired", reply, retriable=True) from error
            with charge:
                self.used.add(charge.group.url)
                self._prefilling.append(charge)
                try:
                    await run_prefill_leg(self._engines, charge, exchange.request.path, leg_headers, chunks)
                except FingerprintRefused:
                    charge.group.refuse(leg.fingerprint, time.monotonic())
                    continue
                finally:
                    self._prefilling.remove(charge)
            self._metrics.leg_seconds.labels("prefill").observe(time.monotonic() - started_at)
            return

    async def _run_whole(self, tried: AbstractSet[str]) -> web.StreamResponse:
        """A plain proxy to one unified group."""
        exchange, limits = self._exchange, self._engines.limits
        silence_seconds = limits.ticket_seconds + limits.prefill_seconds if exchange.wants_stream else None
        with await self._fleet.dispatch_soon(Role.UNIFIED, limits.group_seconds, tried=tried) as charge:
            self.used.add(charge.group.url)
            response = None
            try:
                async with self._engines.faults(charge, Role.UNIFIED, silence_seconds):
                    response = await self._engines.post(
                        charge, exchange.request.path, exchange.leg_headers(None, self._number), exchange.body
                    )
                    if response.status == 200 and response.content_type == EVENT_STREAM:
                        reader = EventReader(response.content, limits.max_reply_bytes)
                        first = await reader.whole_events()
                        if not first:
                            raise StreamBroken("an empty stream")
                    else:
                        reader = None
                        reply = await self._engines.read_reply(response)
                if reader is not None:
                    return await self._stream(first, reader, charge)
                if reply.status >= 500:
                    raise refusal(Role.UNIFIED, charge.group.url, reply)
                return await exchange.reply(reply)
            finally:
                if response is not None:
                    response.close()

    async def _stream(self, events: bytes, reader: EventReader, charge: Charge) -> web.StreamResponse:
        """Pass events on as they are made. From here on errors are events, not attempts."""
        exchange = self._exchange
        idle_seconds = self._engines.limits.idle_seconds
        response = await exchange.start(events)
        now = asyncio.get_running_loop().time
        is_sending = False
        try:
            async with asyncio.timeout(idle_seconds) as silence:
                with charge.group.ends(silence):
                    while chunk := await reader.whole_events():
                        charge.group.heard()
                        events = chunk
                        silence.reschedule(now() + idle_seconds)
                        is_sending = True
                        await exchange.send(events)
                        is_sending = False
                        silence.reschedule(now() + idle_seconds)
        except (aiohttp.ClientError, OSError, StreamBroken, TimeoutError) as error:
            if is_sending and isinstance(error, TimeoutError) and charge.group.responds:
                raise ClientGone from error  # it does not read, which is no fault of the group's
            charge.unreachable(time.monotonic())
            what = "was lost" if not isinstance(error, TimeoutError) else "went silent"
            if not charge.group.responds:
                what = "has stopped responding"
            await exchange.break_off(f"the group that made this answer {what} before its end", "stream_broken")
            return response
        if not ends_properly(events):
            await exchange.break_off("the answer ended before it was complete", "stream_broken")
            return response
        await exchange.finish()
        return response


async def _cancel(*tasks: asyncio.Task[object]) -> None:
    """End the tasks and wait until they have ended, so that no leg outlives its attempt."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
