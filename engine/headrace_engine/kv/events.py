"""What the transfer agent reports to its rank loop."""

from __future__ import annotations

from dataclasses import dataclass

from headrace_engine.kv.push import PushKey
from headrace_engine.kv.receive import ReceiveEvent


@dataclass(frozen=True)
class PushDone:
    """Every byte is written and decode has been told. The local blocks and slot are the caller's again."""

    key: PushKey
    request_id: str
    num_bytes: int
    seconds: float  # from the first write's start to the end


@dataclass(frozen=True)
class PushFailed:
    """No write is running any more and decode has been told, if it can be reached. The local blocks are free."""

    key: PushKey
    request_id: str
    error: str


TransferEvent = PushDone | PushFailed | ReceiveEvent


@dataclass
class TransferStats:
    """Counters since the start, and what is open now."""

    num_pushing: int = 0
    num_without_lease: int = 0  # of these, those whose first lease decode has not granted yet
    num_expected: int = 0
    num_peers: int = 0
    pushed_bytes_total: int = 0
    push_seconds_total: float = 0.0
    num_pushes_total: int = 0  # that have ended, well or not
    num_push_failures_total: int = 0
    num_receives_total: int = 0
    num_receive_failures_total: int = 0
    num_stale_notices_total: int = 0  # notices that fitted no open transfer
    oldest_age_seconds: float = 0.0  # of the oldest open push or expected ticket
