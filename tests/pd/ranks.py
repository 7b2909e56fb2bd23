"""Two ranks without their processes: real models, schedulers and transfers, driven turn by turn in one thread.

What the processes add (HTTP, sockets, collectives) is tested with `engines`; here a test can look into the cache, and
many configurations cost no start.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from tests.pd.engines import BLOCK

from headrace_engine import models
from headrace_engine.core import EngineRequest, Leg, Region, Role, SamplingParams, Ticket
from headrace_engine.ep.local import LocalExchange
from headrace_engine.kv import layout
from headrace_engine.kv.blocks import BlockPool
from headrace_engine.kv.ticket import CacheRegion
from headrace_engine.kv.transfer import TransferAgent
from headrace_engine.messages import Pushed
from headrace_engine.models.deepseek_v4.model import DeepseekV4
from headrace_engine.models.tiny import write_tiny
from headrace_engine.runner import Runner
from headrace_engine.scheduler import Scheduler, SchedulerLimits
from headrace_engine.sequence import Generated, IssueTicket, Refused, Status
from headrace_engine.sequence import Sequence as EngineSequence
from headrace_engine.transfers import Transfers

NUM_BLOCKS, NUM_SLOTS, MAX_SEQUENCES = 272, 16, 8
MAX_MODEL_LEN = 2048
WAIT_SECONDS = 60.0


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens, temperature=0, ignore_eos=True)


class RecordingModel:
    """Keeps the logits of every forward that has some, [rows, vocab]."""

    def __init__(self, model: DeepseekV4) -> None:
        self._model = model
        self.logits: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, *arguments: Any) -> torch.Tensor:
        logits = self._model.forward(*arguments)
        if len(logits):
            self.logits.append(logits.clone())
        return logits


class Side:
    """One rank of a role. max_batch_tokens: the largest chunk of a prompt."""

    def __init__(self, model: DeepseekV4, role: Role, max_batch_tokens: int = 40) -> None:
        self.cache = layout.allocate_cache(model.cache_groups, BLOCK, NUM_BLOCKS, NUM_SLOTS)
        has_snapshots = role is not Role.DECODE
        pool = BlockPool(NUM_BLOCKS, NUM_SLOTS, BLOCK, needs_snapshots=has_snapshots)
        limits = SchedulerLimits(max_batch_tokens, max_batch_tokens, MAX_SEQUENCES, 8, MAX_MODEL_LEN, frozenset())
        self.scheduler = Scheduler(limits, pool, has_snapshots=has_snapshots)
        self.model = RecordingModel(model)
        self.runner = Runner(
            self.model,
            self.cache,
            LocalExchange(),
            max_batch_tokens=max_batch_tokens,
            max_sequences=MAX_SEQUENCES,
            max_blocks=MAX_MODEL_LEN // BLOCK,
            num_slots=NUM_SLOTS,
        )
        self.agent = None if role is Role.UNIFIED else _agent(model, role, self.cache)
        self.transfers = Transfers(self.agent, self.scheduler) if self.agent is not None else None
        self.tickets: list[Ticket] = []
        self.sequences: list[EngineSequence] = []  # of the tickets, in the same order
        self.answers: dict[str, list[int]] = {}  # tokens, by request

    def add(
        self,
        name: str,
        leg: Leg,
        prompt: Sequence[int],
        sampling: SamplingParams,
        ticket: Ticket | None = None,
        leader: str | None = None,
    ) -> None:
        self.answers[name] = []
        request = EngineRequest(name, leg, list(prompt), sampling, ticket, leader)
        if leg is Leg.PREFILL:
            assert self.transfers is not None
            assert self.transfers.open_push(request) is None
        self.scheduler.add(request, time.monotonic())

    def take_events(self) -> None:
        if self.transfers is not None:
            for message in self.transfers.poll():
                assert isinstance(message, Pushed), message

    def turn(self) -> None:
        """What `RankLoop` does in a turn, without its sockets."""
        self.take_events()
        step = self.scheduler.schedule(time.monotonic())
        self.runner.copy_slots(step.slot_copies)
        self.runner.copy_blocks(step.block_copies)
        self._act()
        if step.rows:
            self.runner.copy_slots(self.scheduler.commit(step, self.runner.run(step.rows)))
            self._act()

    def _act(self) -> None:
        for action in self.scheduler.take_actions():
            assert not isinstance(action, Refused), action
            if isinstance(action, Generated):
                self.answers[action.request_id].append(action.token_id)
                continue
            assert self.transfers is not None
            if isinstance(action, IssueTicket):
                self.sequences.append(action.sequence)
                self.tickets.append(self.transfers.issue(action))
            else:
                self.transfers.act(action)

    def close(self) -> None:
        if self.agent is not None:
            self.agent.close()


class Pair:
    """A prefill rank and a decode rank over one copy of the weights."""

    def __init__(self, model: DeepseekV4, max_batch_tokens: int = 40) -> None:
        self.prefill = Side(model, Role.PREFILL, max_batch_tokens)
        self.decode = Side(model, Role.DECODE)
        self._count = 0

    def generate(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """The greedy tokens of a round trip; everything is free again after it."""
        return self.generate_several(prompt, [greedy(max_tokens)])[0]

    def generate_several(self, prompt: Sequence[int], samplings: Sequence[SamplingParams]) -> list[list[int]]:
        """The tokens of several answers to a prompt that is pushed once; everything is free again after it."""
        self.decode.answers.clear()
        self.receive(prompt, *samplings)
        self._until(lambda: self.decode.scheduler.is_empty and self.prefill.scheduler.is_empty, self.decode.turn)
        return list(self.decode.answers.values())

    def receive(self, prompt: Sequence[int], *samplings: SamplingParams) -> EngineSequence:
        """Decode's sequence, the first of several, just when its KV has come and before it has computed anything."""
        self._count += 1
        name = str(self._count)
        for number, sampling in enumerate(samplings):
            leader = name if number else None
            self.decode.add(f"{name}.{number}" if leader else name, Leg.DECODE, prompt, sampling, leader=leader)
        self.decode.turn()
        sequence = self.decode.sequences.pop()
        self.prefill.add(name, Leg.PREFILL, prompt, samplings[0], self.decode.tickets.pop())
        self._until(lambda: sequence.status is Status.RUNNING, self.decode.take_events)
        return sequence

    def _until(self, is_done: Callable[[], bool], decode: Callable[[], None]) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not is_done():
            assert time.monotonic() < deadline
            self.prefill.turn()
            decode()

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()


@contextmanager
def tiny_pair(folder: Path, family: str, cache_dtype: str) -> Iterator[tuple[Any, Pair]]:
    """A tiny model of a family, written to `folder`, and a pair over it. At the end decode has all blocks back."""
    torch.set_num_threads(1)
    write_tiny(folder, family, 0)
    model = models.load(folder, cache_dtype=cache_dtype)
    with closing(Pair(model)) as pair:
        yield model, pair
        assert pair.decode.scheduler.pool.num_free_blocks == NUM_BLOCKS


def generate_alone(model: DeepseekV4, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], torch.Tensor]:
    """One unified rank's greedy tokens and the logits of each, [max_tokens, vocab]."""
    side = Side(model, Role.UNIFIED)
    side.add("alone", Leg.WHOLE, prompt, greedy(max_tokens))
    while not side.scheduler.is_empty:
        side.turn()
    return side.answers["alone"], torch.cat(side.model.logits)


def _agent(model: DeepseekV4, role: Role, cache: dict[str, torch.Tensor]) -> TransferAgent:
    regions = [
        CacheRegion(Region(g.name, cache[g.name].data_ptr(), cache[g.name][0].nbytes, len(cache[g.name])), g.kind)
        for g in model.cache_groups
    ]
    fingerprint = layout.fingerprint(model.cache_groups, BLOCK, model.digest)
    return TransferAgent(
        role.value, str(uuid.uuid4()), regions, block_size=BLOCK, fingerprint=fingerprint, lease_seconds=30
    )
