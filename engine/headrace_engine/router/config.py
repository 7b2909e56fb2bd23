"""The router's limits, each with its default. Times are seconds; every wait of a request is under one of them."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024 * 1024


@dataclass(frozen=True)
class Limits:
    max_attempts: int = 3  # fresh pairs of groups before the client has seen a byte
    request_seconds: float = 3600.0  # one request from its first byte in to its last byte out
    connect_seconds: float = 5.0  # TCP connection to an engine
    ticket_seconds: float = 60.0  # decode leg sent -> ticket received
    # prefill leg sent -> pushed. Decode notices within a lease that a prefill rank is gone; this is for a busy one.
    prefill_seconds: float = 1800.0
    unresponsive_seconds: float = 15.0  # silence, also to GET /health, of a group with legs under way: it is lost
    group_seconds: float = 5.0  # waiting for a group whose cool-down or trial is about to end
    idle_seconds: float = 300.0  # silence of a decode group that should be streaming
    # SIGTERM -> no new connection is taken; until then every answer asks its client to connect anew, elsewhere
    leave_seconds: float = 0.0
    drain_seconds: float = 30.0  # then -> streams still open end with an error
    max_body_bytes: int = 64 * MIB  # of a client's request
    max_reply_bytes: int = 256 * MIB  # of one event or whole answer of an engine
    max_in_flight: int = 8192  # requests at once; more get 429
