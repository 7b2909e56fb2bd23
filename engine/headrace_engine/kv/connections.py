"""Which peers this rank is connected to: one connection for each life of a rank, a bounded number of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Protocol

from headrace_engine.core import Peer
from headrace_engine.kv.nixl import TransportError

MAX_PEERS = 256  # connections kept; the least recently used idle one goes first


class Connector(Protocol):
    """See `nixl.NixlTransport`, whose methods these are."""

    def connect(self, peer: Peer) -> None: ...

    def disconnect(self, peer_name: str) -> None: ...


class Connections:
    """Connects when a peer is first needed, and lets go of former lives of a rank and of what is not used any more."""

    def __init__(self, transport: Connector) -> None:
        self._transport = transport
        self._peers: OrderedDict[str, Peer] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._peers)

    def __contains__(self, peer_name: str) -> bool:
        return peer_name in self._peers

    def use(self, peer: Peer, in_use: Collection[str]) -> None:
        """Make sure of a connection to `peer`. `in_use`: names whose connections must stay. Raises TransportError."""
        known = self._peers.get(peer.agent_name)
        if known == peer:
            self._peers.move_to_end(peer.agent_name)
            return
        if known is not None:
            if peer.agent_name in in_use:
                raise TransportError(f"{peer.agent_name!r} is in use with other regions or metadata")
            self.drop(peer.agent_name)
        rank_name = _rank_name(peer.agent_name)
        for name in list(self._peers):
            is_old_life = _rank_name(name) == rank_name
            if name not in in_use and (is_old_life or len(self._peers) >= MAX_PEERS):
                self.drop(name)
        if len(self._peers) >= MAX_PEERS:
            raise TransportError(f"{MAX_PEERS} ranks are connected and in use; no more connections")
        self._transport.connect(peer)
        self._peers[peer.agent_name] = peer

    def drop(self, peer_name: str) -> None:
        """End a connection, and with it every write over it. Without effect if there is none."""
        if self._peers.pop(peer_name, None) is not None:
            self._transport.disconnect(peer_name)


def _rank_name(agent_name: str) -> str:
    """An agent's name without its incarnation: the same for every life of a rank."""
    return agent_name.rpartition("/")[0]
