"""One request in flight, and one rank, as the frontend sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace_engine.messages import Failed, Hello, Pushed, RankState, TicketReady, Tokens
from headrace_engine.server.loading import Loading
from headrace_engine.server.recent import RecentRise

Item = TicketReady | Tokens | Pushed | Failed


class RequestHandle:
    """One request in flight: what its rank says, in order. `close` it on every path."""

    __slots__ = ("_close", "_items", "_timer", "_waiter", "is_ended", "rank", "request_id")

    def __init__(self, request_id: str, rank: int, close: Callable[[RequestHandle], None]) -> None:
        self.request_id = request_id
        self.rank = rank
        self.is_ended = False  # the rank has said its last word
        self._items: list[Item] = []
        self._waiter: asyncio.Future[None] | None = None
        self._close = close
        self._timer: asyncio.TimerHandle | None = None

    async def next(self) -> list[Item]:
        """At least one item, all that have come. After the last one there is nothing to wait for."""
        while not self._items:
            assert not self.is_ended, "nothing more will come"
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        items, self._items = self._items, []
        return items

    def deliver(self, item: Item) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def num_unread(self) -> int:
        return len(self._items)

    def set_deadline(self, timer: asyncio.TimerHandle) -> None:
        self._timer = timer

    def close(self) -> None:
        """The request is over for its client. Aborts it if the rank still works on it. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._close(self)


class RankView:
    """What the frontend knows of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.hello: Hello | None = None
        self.state: RankState | None = None
        self.loading: Loading | None = None  # of ranks on the leader's own pod
        self.num_live = 0
        self.recent_prompt_tokens = RecentRise()  # computed, not found in a cache
        self.recent_prompt_seconds = RecentRise()  # of steps that computed them

    def report(self, state: RankState, now: float) -> None:
        """The rank has said how it is. now: on any one clock."""
        self.state = state
        self.recent_prompt_tokens.read(state.computed_prompt_tokens_total, now)
        self.recent_prompt_seconds.read(state.prompt_seconds_total, now)
