"""What engines say of their load, and what that says of a role. Pure: the JSON of /state in, numbers out.

Engines tell of their last half minute, in counts that add up over groups, so one look at all of them is enough and
nothing has to be remembered from look to look. Times are those that 9 of 10 requests (or tokens) do not exceed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

# With fewer observations in the last half minute the slowest tenth is an accident.
MIN_OBSERVATIONS = 10
_QUANTILE = 0.9
_MAX_BUCKETS = 1024


@dataclass(frozen=True)
class Sample:
    """What one group's leader said. Times of answers are counts by bucket; `bounds` are the buckets' upper ends."""

    time: float  # epoch seconds when it was heard
    num_ranks: int
    num_requests: int  # live
    num_running: int
    num_waiting_for_kv: int  # decode: they have their cache space, and wait for prefill
    num_queued_tokens: int  # of prompts, yet to be computed
    num_blocks: int
    num_free_blocks: int
    window_seconds: float  # what follows is of so many seconds before
    num_prompt_tokens: int  # computed
    prompt_seconds: float  # spent on computing them, summed over ranks
    bounds: tuple[float, ...]
    ticket: tuple[int, ...]  # decode: from arrival to the ticket
    prompt: tuple[int, ...]  # decode: from the ticket to the first token
    inter_token: tuple[int, ...]


@dataclass(frozen=True)
class Measured:
    """What all groups of a role are like together. None: there was too little to tell."""

    requests_per_rank: float  # without those that wait for prefill
    kv_use: float  # share of the blocks, 0 to 1; without those that wait for prefill
    waits_for_prefill: float  # share of the requests with cache space that wait for prefill, 0 to 1
    busy: float  # share of the ranks' time that computing prompts took, 0 to 1
    backlog_seconds: float | None  # how long the queued prompt tokens will take, at the speed of late
    window_seconds: float
    ticket_seconds: float | None
    prompt_seconds: float | None
    inter_token_seconds: float | None


def sample_of(state: Any, now: float) -> Sample | None:
    """The sample in a leader's /state; None if it is not what a leader says that serves."""
    try:
        ranks, recent = list(state["ranks"]), state["recent"]
        if not ranks or not state["ready"]:
            return None
        sample = Sample(
            time=now,
            num_ranks=len(ranks),
            num_requests=sum(int(rank["live_requests"]) for rank in ranks),
            num_running=sum(int(rank["num_running"]) for rank in ranks),
            num_waiting_for_kv=sum(int(rank["num_waiting_for_kv"]) for rank in ranks),
            num_queued_tokens=sum(int(rank["num_queued_tokens"]) for rank in ranks),
            num_blocks=sum(int(rank["num_blocks"]) for rank in ranks),
            num_free_blocks=sum(int(rank["num_free_blocks"]) for rank in ranks),
            window_seconds=float(recent["window_seconds"]),
            num_prompt_tokens=sum(int(rank["recent_prompt_tokens"]) for rank in ranks),
            prompt_seconds=sum(float(rank["recent_prompt_seconds"]) for rank in ranks),
            bounds=tuple(float(bound) for bound in recent["bounds_seconds"]),
            **{name: tuple(int(n) for n in recent[name]) for name in _TIMES},
        )
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError):
        return None
    return sample if _is_sound(sample) else None


def measured(samples: Iterable[Sample]) -> Measured | None:
    """The role whose groups said this; None without any group, or if their buckets differ (a roll-out changes them).

    Where prefill is short, decode fills with requests that wait for it: they hold blocks and keep others from theirs.
    That is no load of decode, and would make it seem short too, so their part is left out (blocks in proportion).
    """
    samples = list(samples)
    if not samples or len({(sample.bounds, sample.window_seconds) for sample in samples}) > 1:
        return None
    bounds, window = samples[0].bounds, samples[0].window_seconds
    num_ranks = sum(sample.num_ranks for sample in samples)
    seconds = sum(sample.prompt_seconds for sample in samples)
    tokens = sum(sample.num_prompt_tokens for sample in samples)
    queued = sum(sample.num_queued_tokens for sample in samples)
    num_blocks = sum(sample.num_blocks for sample in samples)
    num_waiting = sum(sample.num_waiting_for_kv for sample in samples)
    num_admitted = sum(sample.num_running for sample in samples) + num_waiting
    own = 1 - num_waiting / num_admitted if num_admitted else 1.0
    backlog = queued * seconds / (tokens * num_ranks) if tokens and seconds else (None if queued else 0.0)
    times = {name: _slow([getattr(sample, name) for sample in samples], bounds) for name in _TIMES}
    return Measured(
        requests_per_rank=own * sum(sample.num_requests for sample in samples) / num_ranks,
        kv_use=own * (1 - sum(sample.num_free_blocks for sample in samples) / num_blocks),
        waits_for_prefill=1 - own,
        busy=min(1.0, seconds / (window * num_ranks)),
        backlog_seconds=backlog,
        window_seconds=window,
        ticket_seconds=times["ticket"],
        prompt_seconds=times["prompt"],
        inter_token_seconds=times["inter_token"],
    )


def quantile(counts: Sequence[int], bounds: Sequence[float], share: float) -> float:
    """The time that `share` of the counted ones did not exceed, evenly spread within a bucket; some must be counted.

    `counts` has one bucket more than `bounds`; of what is in that one only the lower end is known.
    """
    wanted = share * sum(counts)
    below, lower = 0, 0.0
    for count, upper in zip(counts, bounds, strict=False):
        if count and below + count >= wanted:
            return lower + (upper - lower) * max(0.0, wanted - below) / count
        below, lower = below + count, upper
    return bounds[-1]


_TIMES = ("ticket", "prompt", "inter_token")


def _slow(counts: Sequence[Sequence[int]], bounds: Sequence[float]) -> float | None:
    totals = [sum(bucket) for bucket in zip(*counts, strict=True)]
    return quantile(totals, bounds, _QUANTILE) if sum(totals) >= MIN_OBSERVATIONS else None


def _is_sound(sample: Sample) -> bool:
    """Whether the numbers can be: nothing negative or infinite, buckets in order, as many counts as buckets."""
    numbers: list[float] = [sample.num_blocks - sample.num_free_blocks]
    for field in fields(sample):
        value = getattr(sample, field.name)
        numbers += value if isinstance(value, tuple) else [value]
    bounds = sample.bounds
    return (
        0 < len(bounds) < _MAX_BUCKETS
        and all(len(getattr(sample, name)) == len(bounds) + 1 for name in _TIMES)
        and all(lower < upper for lower, upper in pairwise(bounds))
        and all(math.isfinite(number) and number >= 0 for number in numbers)
        and sample.num_blocks > 0
        and sample.window_seconds > 0
    )
