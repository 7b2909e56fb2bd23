"""Each part of the transferred state is needed: without it, decode's logits are not those of one engine.

Both ranks live in this process, over one copy of the weights and real transfers. A subclass of the engine's own glue
forgets a part of what has arrived, before the sequence runs.
"""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.pd.engines import BLOCK, prompts_of

from headrace_engine import models
from headrace_engine.core import EngineRequest, Leg, Region, Role, SamplingParams, Ticket
from headrace_engine.ep.local import LocalExchange
from headrace_engine.kv import layout
from headrace_engine.kv.blocks import BlockPool
from headrace_engine.kv.ticket import CacheRegion
from headrace_engine.kv.transfer import TransferAgent
from headrace_engine.messages import Failed, Pushed
from headrace_engine.models.deepseek_v4.model import DeepseekV4
from headrace_engine.models.deepseek_v4.tiny import write_tiny
from headrace_engine.models.protocol import GroupKind
from headrace_engine.runner import Runner
from headrace_engine.scheduler import Scheduler, SchedulerLimits
from headrace_engine.sequence import Generated, IssueTicket, Refused
from headrace_engine.transfers import Transfers

NUM_BLOCKS, NUM_SLOTS, MAX_TOKENS = 64, 4, 12
PROMPT_TOKENS = 136  # beyond the index's top-k; the last group of each compressor lacks one token
TOLERANCE = 1e-3  # of logits of order 1; one engine and two differ by rounding only, about 1e-6


class RecordingModel:
    """Keeps the logits of every forward, [rows, vocab]."""

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


class ForgetfulTransfers(Transfers):
    """Zeroes one cache group's part of what has arrived."""

    forget: str | None = None
    cache: dict[str, torch.Tensor]
    model: DeepseekV4

    def poll(self) -> list[Pushed | Failed]:
        waiting = dict(self._scheduler._by_generation)
        messages = super().poll()
        for generation, sequence in waiting.items():
            if generation not in self._scheduler._by_generation and self.forget is not None:
                (group,) = [g for g in self.model.cache_groups if g.name == self.forget]
                items = sequence.block_ids if group.kind is GroupKind.PAGED else [sequence.state_slot]
                self.cache[self.forget][items] = 0
        return messages


class Side:
    """One rank without its process."""

    def __init__(self, model: DeepseekV4, role: Role) -> None:
        self.cache = layout.allocate_cache(model.cache_groups, BLOCK, NUM_BLOCKS, NUM_SLOTS)
        has_snapshots = role is not Role.DECODE
        pool = BlockPool(NUM_BLOCKS, NUM_SLOTS, BLOCK, needs_snapshots=has_snapshots)
        self.scheduler = Scheduler(SchedulerLimits(40, 2, 8, 512, frozenset()), pool, has_snapshots=has_snapshots)
        self.model = RecordingModel(model)
        self.runner = Runner(
            self.model,
            self.cache,
            LocalExchange(),
            max_batch_tokens=40,
            max_sequences=2,
            max_blocks=NUM_BLOCKS,
            num_slots=NUM_SLOTS,
        )
        regions = [
            CacheRegion(
                Region(g.name, self.cache[g.name].data_ptr(), self.cache[g.name][0].nbytes, len(self.cache[g.name])),
                g.kind,
            )
            for g in model.cache_groups
        ]
        fingerprint = layout.fingerprint(model.cache_groups, BLOCK, model.digest)
        self.agent = TransferAgent(
            role.value, str(uuid.uuid4()), regions, block_size=BLOCK, fingerprint=fingerprint, lease_seconds=30
        )
        self.transfers = ForgetfulTransfers(self.agent, self.scheduler)
        self.transfers.cache, self.transfers.model = self.cache, model
        self.tickets: list[Ticket] = []

    def turn(self) -> None:
        for message in self.transfers.poll():
            assert isinstance(message, Pushed), message
        step = self.scheduler.schedule(time.monotonic())
        self.runner.copy_slots(step.slot_copies)
        self._act()
        if step.rows:
            self.runner.copy_slots(self.scheduler.commit(step, self.runner.run(step.rows)))
            self._act()

    def _act(self) -> None:
        for action in self.scheduler.take_actions():
            assert not isinstance(action, Refused), action
            if isinstance(action, IssueTicket):
                self.tickets.append(self.transfers.issue(action))
            elif not isinstance(action, Generated):
                self.transfers.act(action)


class Pair:
    def __init__(self, model: DeepseekV4) -> None:
        self.prefill, self.decode = Side(model, Role.PREFILL), Side(model, Role.DECODE)
        self._count = 0

    def logits(self, prompt: list[int], forget: str | None) -> torch.Tensor:
        """Logits of every generated token of a round trip, [MAX_TOKENS, vocab]."""
        self._count += 1
        name = str(self._count)
        sampling = SamplingParams(MAX_TOKENS, temperature=0, ignore_eos=True)
        self.decode.transfers.forget = forget
        self.decode.model.logits.clear()
        self.decode.scheduler.add(EngineRequest(name, Leg.DECODE, prompt, sampling), time.monotonic())
        self.decode.turn()
        leg = EngineRequest(name, Leg.PREFILL, prompt, sampling, self.decode.tickets.pop())
        assert self.prefill.transfers.open_push(leg) is None
        self.prefill.scheduler.add(leg, time.monotonic())
        deadline = time.monotonic() + 60
        while not (self.decode.scheduler.is_empty and self.prefill.scheduler.is_empty):
            assert time.monotonic() < deadline
            self.prefill.turn()
            self.decode.turn()
        return torch.cat(self.decode.model.logits)

    def close(self) -> None:
        self.prefill.agent.close()
        self.decode.agent.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DeepseekV4:
    torch.set_num_threads(1)
    path: Path = tmp_path_factory.mktemp("tiny")
    write_tiny(path, "v4", 0)
    return models.load(path)


@pytest.fixture
def pair(model: DeepseekV4):
    pair = Pair(model)
    yield pair
    pair.close()


def test_without_any_one_cache_group_the_logits_differ(model: DeepseekV4, pair: Pair) -> None:
    # Prompts that share no block, as decode would otherwise hold the blocks that an earlier try has spoiled.
    prompts = prompts_of([PROMPT_TOKENS] * (len(model.cache_groups) + 1), first=10)
    expected = [_alone(model, prompt) for prompt in prompts]
    assert torch.allclose(pair.logits(prompts[0], None), expected[0], atol=TOLERANCE)
    for group, prompt, logits in zip(model.cache_groups, prompts[1:], expected[1:], strict=True):
        difference = (pair.logits(prompt, group.name) - logits).abs().max()
        assert difference > 10 * TOLERANCE, f"{group.name} does not matter: {difference}"


def _alone(model: DeepseekV4, prompt: list[int]) -> torch.Tensor:
    side = Side(model, Role.UNIFIED)
    sampling = SamplingParams(MAX_TOKENS, temperature=0, ignore_eos=True)
    side.scheduler.add(EngineRequest("alone", Leg.WHOLE, prompt, sampling), 0)
    while not side.scheduler.is_empty:
        side.turn()
    side.agent.close()
    return torch.cat(side.model.logits)
