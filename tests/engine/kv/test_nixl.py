"""NixlTransport: what NIXL itself does with good, bad and damaged input. Two agents in this process."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from headrace_engine.core import Peer, Region
from headrace_engine.kv import nixl
from headrace_engine.kv.nixl import NixlTransport, TransportError, WriteState
from headrace_engine.kv.ticket import CacheRegion
from headrace_engine.models.protocol import GroupKind

NUM_BLOCKS, BLOCK_BYTES, SLOT_BYTES = 8, 256, 64


class Agent:
    def __init__(self, name: str, fill: int) -> None:
        self.blocks = np.full((NUM_BLOCKS, BLOCK_BYTES), fill, dtype=np.uint8)
        self.slots = np.full((2, SLOT_BYTES), fill, dtype=np.uint8)
        self.transport = NixlTransport(
            name,
            [
                CacheRegion(Region("blocks", self.blocks.ctypes.data, BLOCK_BYTES, NUM_BLOCKS), GroupKind.PAGED),
                CacheRegion(Region("state", self.slots.ctypes.data, SLOT_BYTES, 2), GroupKind.STATE),
            ],
        )


@pytest.fixture
def agents() -> Iterator[tuple[Agent, Agent]]:
    pair = (Agent("writer/1", fill=7), Agent("target/1", fill=0))
    yield pair
    for agent in pair:
        agent.transport.close()


def write(
    writer: Agent, target: Agent, blocks: list[int], slots: tuple[int, int] | None = None
) -> list[tuple[str, bytes]]:
    """Write to the same block ids of the target; returns (sender, notification) that it then has."""
    handle = writer.transport.write("target/1", blocks, blocks, slots, b"written")
    received: list[tuple[str, bytes]] = []
    give_up_at = time.monotonic() + 10
    while (handle.state is WriteState.RUNNING or not received) and time.monotonic() < give_up_at:
        received += target.transport.notifications()
        writer.transport.poll(handle)
    assert handle.state is WriteState.DONE
    return received


def test_a_write_fills_its_items_and_no_others(agents: tuple[Agent, Agent]) -> None:
    writer, target = agents
    writer.transport.connect(target.transport.peer)
    writer.transport.connect(target.transport.peer)  # again: nothing happens
    assert write(writer, target, [1, 2, 6], slots=(0, 1)) == [("writer/1", b"written")]
    assert [bool(block.all()) for block in target.blocks] == [index in (1, 2, 6) for index in range(NUM_BLOCKS)]
    assert (not target.slots[0].any(), target.slots[1].all()) == (True, True)


def test_items_beyond_the_target_are_refused(agents: tuple[Agent, Agent]) -> None:
    writer, target = agents
    writer.transport.connect(target.transport.peer)
    with pytest.raises(TransportError, match="cannot write to 'target/1'"):
        writer.transport.write("target/1", [0], [NUM_BLOCKS + 2], None, b"")
    with pytest.raises(TransportError, match="not connected"):
        writer.transport.write("nobody/1", [0], [0], None, b"")


def test_memory_that_the_target_has_not_registered_is_refused(agents: tuple[Agent, Agent]) -> None:
    writer, target = agents
    regions = list(target.transport.peer.regions)
    regions[0] = msgspec.structs.replace(regions[0], base_address=regions[0].base_address + (1 << 30))
    with pytest.raises(TransportError, match="cannot connect"):
        writer.transport.connect(msgspec.structs.replace(target.transport.peer, regions=tuple(regions)))
    writer.transport.connect(target.transport.peer)
    assert write(writer, target, [0]) == [("writer/1", b"written")]


def test_a_peer_under_another_name_is_refused(agents: tuple[Agent, Agent]) -> None:
    writer, target = agents
    with pytest.raises(TransportError, match="not of 'target/2'"):
        writer.transport.connect(msgspec.structs.replace(target.transport.peer, agent_name="target/2"))


def test_damaged_metadata_never_reaches_nixl(agents: tuple[Agent, Agent]) -> None:
    writer, target = agents
    metadata = target.transport.peer.agent_metadata
    generator = random.Random(0)
    for _ in range(50):
        damaged = bytearray(metadata[: generator.randrange(1, len(metadata))])
        damaged[generator.randrange(len(damaged))] ^= 1 + generator.randrange(255)
        with pytest.raises(TransportError, match="damaged"):
            writer.transport.connect(Peer("target/1", bytes(damaged), target.transport.peer.regions))


def test_refused_metadata_does_not_spoil_the_next_attempt(agents: tuple[Agent, Agent]) -> None:
    writer, target = agents
    blob = nixl._unseal(target.transport.peer.agent_metadata)
    for forged in (b"", b"nonsense", blob[: len(blob) // 2]):
        with pytest.raises(TransportError):
            writer.transport.connect(Peer("target/1", nixl._seal(forged), target.transport.peer.regions))
    writer.transport.connect(target.transport.peer)
    assert write(writer, target, [3]) == [("writer/1", b"written")]


def test_standard_output_stays_clean() -> None:
    """The engine prints one JSON line there."""
    program = "from headrace_engine.kv.nixl import NixlTransport; NixlTransport('a/1', [])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.stdout == ""


def test_a_peer_without_regions_can_be_notified(agents: tuple[Agent, Agent]) -> None:
    writer, target = agents
    writer.transport.connect(target.transport.peer)
    writer.transport.notify("target/1", b"hello")
    received: list[tuple[str, bytes]] = []
    give_up_at = time.monotonic() + 10
    while not received and time.monotonic() < give_up_at:
        writer.transport.notifications()  # a connection is made by both sides' looking
        received += target.transport.notifications()
    assert received == [("writer/1", b"hello")]
    target.transport.connect(msgspec.structs.replace(writer.transport.peer, regions=()))
    target.transport.notify("writer/1", b"back")
    received.clear()
    while not received and time.monotonic() < give_up_at:
        target.transport.notifications()
        received += writer.transport.notifications()
    assert received == [("target/1", b"back")]
    target.transport.disconnect("writer/1")
