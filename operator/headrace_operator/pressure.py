"""How hard a role is pressed: what was measured, beside what is wanted. Pure.

Two numbers matter. The *pressure* is the worst signal in units of its target: over 1 the role is short, and its clients
notice. The *load* is the share of a role's work that it can do and has to do; unlike a time it is proportional to the
requests, so it tells how many groups would do.

Prefill's load is the time that prompts take: with half of the groups each has twice as much. Decode's are the requests
and the KV blocks of a rank: with half of the groups each has more than twice as many, because a step of more requests
takes longer, so that they stay for longer. Where each rank gets r times as many requests a second, it comes to have
r L / (1 - (r - 1) s) of them instead of L, if the requests' part of a step is s times the rest of it. That is at most
r^2 L while s is at most 1 / r, which is taken for granted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headrace_operator.signals import Measured

# Share of the requests with cache space that wait for prefill: over it, prefill is what keeps others from cache space.
MOSTLY = 0.5
# By which power of the requests of a group its load grows.
PREFILL_GROWTH = 1.0
DECODE_GROWTH = 2.0
# Share of the time that a prefill rank can compute in before requests wait for one another all the time.
FULLY_BUSY = 0.9


@dataclass(frozen=True)
class Wanted:
    """The targets of a deployment."""

    first_token_seconds: float
    inter_token_seconds: float
    kv_use: float
    requests_per_rank: float


@dataclass(frozen=True)
class Signal:
    """One thing that was measured, and its target, in the same unit."""

    name: str
    text: str  # what it is, with {value} and {target}
    value: float
    target: float

    @property
    def pressure(self) -> float:
        return self.value / self.target

    def __str__(self) -> str:
        return self.text.format(value=_short(self.value), target=_short(self.target))


@dataclass(frozen=True)
class Pressed:
    """One role. Signals of which there is too little to tell are left out; at least one is there."""

    signals: tuple[Signal, ...]
    load: float
    growth: float = PREFILL_GROWTH

    @property
    def worst(self) -> Signal:
        return max(self.signals, key=lambda signal: signal.pressure)

    @property
    def pressure(self) -> float:
        return self.worst.pressure

    def load_with(self, before: int, after: int) -> float:
        """The load with `after` groups, of `before` at present."""
        return self.load * math.pow(before / after, self.growth)

    def __str__(self) -> str:
        return f"at {self.pressure:.2f} of its targets: {self.worst}"


def pressed_prefill(prefill: Measured, decode: Measured, wanted: Wanted) -> Pressed | None:
    """None: nothing is known of it. Decode groups see how long a prompt takes, since they wait for it."""
    backlog = prefill.backlog_seconds
    target = wanted.first_token_seconds
    ticket = decode.ticket_seconds if decode.waits_for_prefill > MOSTLY else None
    return _pressed(
        (
            ("prompt", "9 of 10 prompts take up to {value} s (target {target})", decode.prompt_seconds, target),
            ("queue", "{value} s of prompts are queued (target {target})", backlog, target),
            ("ticket", "9 of 10 requests wait up to {value} s for others' prompts (target {target})", ticket, target),
        ),
        load=(prefill.busy + (backlog or 0.0) / prefill.window_seconds) / FULLY_BUSY,
        growth=PREFILL_GROWTH,
    )


def pressed_decode(decode: Measured, wanted: Wanted) -> Pressed | None:
    requests, most = decode.requests_per_rank, wanted.requests_per_rank
    between = decode.inter_token_seconds
    ticket = decode.ticket_seconds if decode.waits_for_prefill <= MOSTLY else None
    first_token = wanted.first_token_seconds
    return _pressed(
        (
            ("requests", "{value} requests a rank (target {target})", requests, most),
            ("kv", "{value} of the KV blocks in use (target {target})", decode.kv_use, wanted.kv_use),
            ("token", "9 of 10 tokens take up to {value} s (target {target})", between, wanted.inter_token_seconds),
            ("ticket", "9 of 10 requests wait up to {value} s for cache space (target {target})", ticket, first_token),
        ),
        load=max(requests / most, decode.kv_use / wanted.kv_use),
        growth=DECODE_GROWTH,
    )


def _pressed(rows: Sequence[tuple[str, str, float | None, float]], load: float, growth: float) -> Pressed | None:
    known = tuple(Signal(name, text, value, target) for name, text, value, target in rows if value is not None)
    return Pressed(known, load, growth) if known else None


def _short(value: float) -> str:
    return f"{value:.3g}"
