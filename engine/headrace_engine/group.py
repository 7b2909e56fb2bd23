"""How the ranks of a group find each other, and the one small all-reduce that starts every step.

Only expert-parallel groups of several ranks need this: every MoE layer is a collective there, so that no rank may run a
forward alone or miss one. What the group does next is decided from the all-reduce's result only, never from what a rank
knows by itself.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

RENDEZVOUS_SECONDS = 600.0  # pods of a group may start minutes apart (images, weights)
COLLECTIVE_SECONDS = 60.0  # a lost peer is seen at once; a frozen one after this
IDLE_BEAT_SECONDS = 1.0
FIRST_IDLE_WAIT_SECONDS = 0.002

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Agreement:
    """What all ranks decided together."""

    must_run: bool  # some rank has tokens: everyone runs the forward
    may_leave: bool  # every rank wants to leave
    any_generates: bool  # some rank has an answer under way
    idle_wait_seconds: float  # how long to wait for messages before the next agreement, if nothing is to run


class StepGroup:
    """This rank's membership of its group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.process_group = group
        self._flags = torch.zeros(4, dtype=torch.int32)
        self._num_idle = 0

    def agree(self, *, has_work: bool, was_woken: bool, wants_to_leave: bool, generates: bool) -> Agreement:
        """A collective. `was_woken`: a message has come since the last agreement.

        A group that was just woken waits briefly only: the message that brings the work to one rank may arrive later
        than the one that tells the others to wake up. The wait doubles with every agreement that finds nothing.
        """
        self._flags[0] = int(has_work)
        self._flags[1] = int(was_woken)
        self._flags[2] = int(not wants_to_leave)
        self._flags[3] = int(generates)
        dist.all_reduce(self._flags, op=dist.ReduceOp.MAX, group=self.process_group)
        any_work, any_woken, any_stays, any_generates = self._flags.tolist()
        self._num_idle = 0 if any_work or any_woken else self._num_idle + 1
        wait = min(IDLE_BEAT_SECONDS, FIRST_IDLE_WAIT_SECONDS * 2 ** min(self._num_idle, 16))
        return Agreement(bool(any_work), not any_stays, bool(any_generates), wait)

    def close(self) -> None:
        dist.destroy_process_group()


def join(host: str, port: int, rank: int, num_ranks: int) -> StepGroup:
    """Meet the other ranks at rank 0's store and form the group. Raises OSError (a port in use, or TimeoutError)."""
    store = _connect_store(host, port, rank, num_ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=RENDEZVOUS_SECONDS)
    )
    # A group of its own for the steps: forming takes minutes at worst, a step never does.
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=COLLECTIVE_SECONDS))
    assert isinstance(group, dist.ProcessGroup)
    return StepGroup(group)


def _connect_store(host: str, port: int, rank: int, num_ranks: int) -> TCPStore:
    """Rank 0 listens; the others retry while its name does not resolve or nobody listens there yet."""
    deadline = time.monotonic() + RENDEZVOUS_SECONDS
    while True:
        try:
            return TCPStore(
                host if rank else "0.0.0.0",
                port,
                num_ranks,
                is_master=rank == 0,
                timeout=timedelta(seconds=10),
                wait_for_workers=False,
            )
        except (RuntimeError, dist.DistError) as error:
            if rank == 0:
                raise OSError(f"rendezvous port {port}: cannot listen: {error}") from error
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {rank} cannot reach the group's store at {host}:{port}: {error}") from error
            log.info("waiting for the group's store at %s:%d (%.0f s left)", host, port, deadline - time.monotonic())
            time.sleep(1)
