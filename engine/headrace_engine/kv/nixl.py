"""NIXL: the only file that knows it. One agent, one thread: nothing here may be called from two threads.

No progress thread (it spins a whole core per agent); instead the owner calls `notifications` and `poll` regularly,
which also lets bytes that peers have sent land here. A write's notification reaches the target after its bytes.
"""

from __future__ import annotations

import enum
import hashlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace_engine.core import Peer, Region
from headrace_engine.kv.ticket import CacheRegion
from headrace_engine.models.protocol import GroupKind

# Read by UCX and NIXL when they are loaded; what the user has set stays.
_ENVIRONMENT_DEFAULTS = {
    "UCX_RCACHE_MAX_UNRELEASED": "1024",  # unbounded by default: registrations pile up in long-running processes
    "UCX_LOG_LEVEL": "error",
    "UCX_LOG_FILE": "stderr",
    "NIXL_LOG_LEVEL": "ERROR",
}
_DIGEST_BYTES = 16


class TransportError(Exception):
    """A peer cannot be reached, or refuses; the message says what NIXL said."""


class WriteState(enum.Enum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass
class WriteHandle:
    """A started write; `state` is as of the last look."""

    state: WriteState
    request: Any


@dataclass
class _Remote:
    items: Any  # NIXL's prepared list of every item of every region of the peer; None if it has none
    first_items: tuple[int, ...]  # where each region's items begin in that list


class NixlTransport:
    """This process's NIXL agent with its cache regions registered, and the peers it writes to.

    Descriptors are prepared once per peer, one for each item (block or slot) of each region in order; a write is two
    equally long lists of indices into them, in which NIXL merges neighbours. Raises TransportError if NIXL cannot start
    or register the memory.
    """

    def __init__(self, agent_name: str, regions: Sequence[CacheRegion]) -> None:
        nixl = _load_nixl()
        self._kinds = tuple(cache.kind for cache in regions)
        self._regions = tuple(cache.region for cache in regions)
        self._first_items = _first_items(self._regions)
        self._remotes: dict[str, _Remote] = {}
        try:
            config = nixl.nixl_agent_config(enable_prog_thread=False, num_threads=0, backends=["UCX"])
            self._agent: Any = nixl.nixl_agent(agent_name, config)
            spans = [(region.base_address, region.item_bytes * region.num_items, 0, "") for region in self._regions]
            self._registered = self._agent.register_memory(spans, "DRAM")
            self._items = self._agent.prep_xfer_dlist("", _descriptors(self._regions), "DRAM")
            self.peer = Peer(agent_name, _seal(self._agent.get_agent_metadata()), self._regions)
        except Exception as error:  # NIXL's errors share no base class
            raise TransportError(f"NIXL cannot start with UCX: {_describe(error)}") from error

    @property
    def peer_names(self) -> list[str]:
        return list(self._remotes)

    def connect(self, peer: Peer) -> None:
        """Learn how to reach a peer, and begin to connect; nothing if it is known. Takes about 10 ms.

        Does not wait for the peer, which may be frozen. A peer without regions can only be notified.
        """
        if peer.agent_name in self._remotes:
            return
        metadata = _unseal(peer.agent_metadata)
        try:
            name = self._agent.add_remote_agent(metadata)
            name = name.decode() if isinstance(name, bytes) else name
            if name != peer.agent_name:
                self._agent.remove_remote_agent(name)
                raise TransportError(f"the metadata is that of agent {name!r}, not of {peer.agent_name!r}")
            self._agent.make_connection(name)
            items = self._agent.prep_xfer_dlist(name, _descriptors(peer.regions), "DRAM") if peer.regions else None
        except TransportError:
            raise
        except Exception as error:
            self._forget(peer.agent_name)  # else NIXL would refuse the next attempt
            raise TransportError(f"cannot connect to {peer.agent_name!r}: {_describe(error)}") from error
        self._remotes[peer.agent_name] = _Remote(items, _first_items(peer.regions))

    def disconnect(self, peer_name: str) -> None:
        """Forget a peer and end its connection; writes to it that are still running are given up."""
        remote = self._remotes.pop(peer_name, None)
        if remote is None:
            return
        if remote.items is not None:
            _release(remote.items)
        self._forget(peer_name)

    def write(
        self,
        peer_name: str,
        local_blocks: Sequence[int],
        remote_blocks: Sequence[int],
        slots: tuple[int, int] | None,
        notification: bytes,
    ) -> WriteHandle:
        """Start to write these blocks of every paged region and, if given, a (local, remote) slot of every state one.

        A non-empty notification follows the bytes. Raises TransportError if the write cannot start.
        """
        remote = self._remotes.get(peer_name)
        if remote is None:
            raise TransportError(f"{peer_name!r} is not connected")
        local_slots, remote_slots = ((slots[0],), (slots[1],)) if slots else ((), ())
        local = self._indices(self._first_items, local_blocks, local_slots)
        there = self._indices(remote.first_items, remote_blocks, remote_slots)
        try:
            request = self._agent.make_prepped_xfer("WRITE", self._items, local, remote.items, there, notification)
            handle = WriteHandle(WriteState.RUNNING, request)
            self._look(handle, self._agent.transfer(request))
        except Exception as error:
            raise TransportError(f"cannot write to {peer_name!r}: {_describe(error)}") from error
        return handle

    def poll(self, handle: WriteHandle) -> WriteState:
        """Where a write stands; frees it once it has ended."""
        if handle.state is WriteState.RUNNING:
            try:
                self._look(handle, self._agent.check_xfer_state(handle.request))
            except Exception:
                handle.state = WriteState.FAILED
                self._drop(handle)
        return handle.state

    def give_up(self, handle: WriteHandle) -> None:
        """Stop looking at a running write. Its peer must be disconnected, which ends it."""
        if handle.state is WriteState.RUNNING:
            handle.state = WriteState.FAILED
            self._drop(handle)

    def notify(self, peer_name: str, message: bytes) -> None:
        """Send a notification by itself. Raises TransportError if the peer is gone."""
        if peer_name not in self._remotes:
            raise TransportError(f"{peer_name!r} is not connected")
        try:
            self._agent.send_notif(peer_name, message)
        except Exception as error:
            raise TransportError(f"cannot notify {peer_name!r}: {_describe(error)}") from error

    def notifications(self) -> list[tuple[str, bytes]]:
        """(sender, message) of what has come since the last call, in order per sender. Also moves bytes along."""
        mail = self._agent.get_new_notifs()
        return [(sender, message) for sender, messages in mail.items() for message in messages]

    def close(self) -> None:
        """Disconnect and deregister. The cache tensors may be freed afterwards."""
        for name in self.peer_names:
            self.disconnect(name)
        _release(self._items)
        self._agent.deregister_memory(self._registered)
        self._agent = None

    def _indices(self, first_items: Sequence[int], blocks: Sequence[int], slots: Sequence[int]) -> np.ndarray:
        """Descriptor indices, region by region: [regions * blocks or slots], int32."""
        by_kind = {
            GroupKind.PAGED: np.asarray(blocks, dtype=np.int32),
            GroupKind.STATE: np.asarray(slots, dtype=np.int32),
        }
        return np.concatenate([by_kind[kind] + first for kind, first in zip(self._kinds, first_items, strict=True)])

    def _look(self, handle: WriteHandle, status: str) -> None:
        if status == "PROC":
            return
        handle.state = WriteState.DONE if status == "DONE" else WriteState.FAILED
        self._drop(handle)

    def _drop(self, handle: WriteHandle) -> None:
        _release(handle.request)
        handle.request = None

    def _forget(self, agent_name: str) -> None:
        try:
            self._agent.remove_remote_agent(agent_name)
        except Exception as error:  # already gone: the peer died, or never got that far
            logging.getLogger(__name__).debug("removing %s: %s", agent_name, _describe(error))


def _load_nixl() -> Any:
    for name, value in _ENVIRONMENT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    import nixl

    logging.getLogger("nixl").setLevel(logging.WARNING)  # its INFO lines go to standard output
    return nixl


def _first_items(regions: Sequence[Region]) -> tuple[int, ...]:
    """Where each region's items begin when all regions' items are counted through."""
    counts = [region.num_items for region in regions]
    return tuple(sum(counts[:index]) for index in range(len(counts)))


def _descriptors(regions: Sequence[Region]) -> np.ndarray:
    """[all items, 3] uint64: address, bytes, device."""
    rows = []
    for region in regions:
        table = np.zeros((region.num_items, 3), dtype=np.uint64)
        table[:, 0] = np.uint64(region.base_address) + np.arange(region.num_items, dtype=np.uint64) * np.uint64(
            region.item_bytes
        )
        table[:, 1] = region.item_bytes
        rows.append(table)
    return np.concatenate(rows)


def _seal(metadata: bytes) -> bytes:
    """Metadata with a digest before it.

    NIXL must not be given damaged bytes: a blob that it can only load in part spoils the peer's name for good.
    """
    return hashlib.blake2b(metadata, digest_size=_DIGEST_BYTES).digest() + metadata


def _unseal(sealed: bytes) -> bytes:
    digest, metadata = sealed[:_DIGEST_BYTES], sealed[_DIGEST_BYTES:]
    if hashlib.blake2b(metadata, digest_size=_DIGEST_BYTES).digest() != digest:
        raise TransportError("the agent metadata is damaged")
    return metadata


def _release(handle: Any) -> None:
    try:
        handle.release()
    except Exception as error:  # still running: NIXL keeps it and frees it with the agent
        logging.getLogger(__name__).debug("releasing a NIXL handle: %s", _describe(error))


def _describe(error: Exception) -> str:
    return f"{error}" or type(error).__name__
