"""What ranks say to each other over the transport: how a push ended, and whose lease goes on. Pure.

The transport names each message's sender, so none repeats it. A message may be lost, late, doubled or from another
version of this program: readers take what they can check and count the rest.
"""

from __future__ import annotations

import msgspec

MAX_GENERATIONS = 1024  # of one message; more are sent in several


class Done(msgspec.Struct, frozen=True, tag="done", array_like=True):
    """Prefill to decode: every byte is written. num_cached_tokens: prompt tokens found in prefill's prefix cache."""

    request_id: str
    generation: int
    num_cached_tokens: int


class Failed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """Prefill to decode: no more writes will start for this ticket, and those that ended are not a whole state.

    is_settled: every write has ended well. Else one was given up with its connection, of which bytes may be under way.
    """

    request_id: str
    generation: int
    error: str
    is_settled: bool = True


class Renew(msgspec.Struct, frozen=True, tag="renew", array_like=True):
    """Prefill to decode: these tickets are being worked on. The first one for a ticket takes it.

    metadata: how decode reaches the sender. sent_at: seconds of the sender's own clock, to be returned as it is.
    """

    metadata: bytes
    sent_at: float
    generations: tuple[int, ...]


class Renewed(msgspec.Struct, frozen=True, tag="renewed", array_like=True):
    """Decode to prefill: the answer to the Renew of `sent_at`. `refused` tickets are over, or another's."""

    sent_at: float
    granted: tuple[int, ...]
    refused: tuple[int, ...]


Completion = Done | Failed
Notice = Done | Failed | Renew | Renewed
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Notice)


def encode_notice(notice: Notice) -> bytes:
    return _encoder.encode(notice)


def decode_notice(data: bytes) -> Notice | None:
    """None if this is no notice of ours (another version's, or another user of the transport)."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
