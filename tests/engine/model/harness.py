"""Runs a model over a paged cache the way the engine does, with everything that could hide a mistake made hostile:
physical blocks and slots in random order, and a cache that is full of NaN before anything is written."""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import torch

from headrace_engine.ep.exchange import Exchange
from headrace_engine.ep.local import LocalExchange
from headrace_engine.kv.layout import allocate_cache
from headrace_engine.models.protocol import ForwardBatch, Model

TOLERANCE = 5e-5  # of fp32 logits whose standard deviation is about 1.2


@dataclass
class Sequence:
    slot: int
    blocks: list[int]
    length: int = 0
    token_ids: list[int] = field(default_factory=list)


class PagedRun:
    """A model with a cache of its own."""

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int = 160,
        num_slots: int = 40,
        block_size: int = 8,
        seed: int = 0,
        exchange: Exchange | None = None,
    ) -> None:
        self.model, self.block_size = model, block_size
        self.exchange = exchange or LocalExchange()
        self.cache = allocate_cache(model.cache_groups, block_size, num_blocks, num_slots)
        for tensor in self.cache.values():
            tensor.fill_(torch.nan if tensor.is_floating_point() else 0xFF)  # of records: scales that are NaN
        rng = random.Random(seed)
        self.free_blocks = rng.sample(range(num_blocks), num_blocks)
        self.free_slots = rng.sample(range(num_slots), num_slots)

    def sequence(self, max_tokens: int) -> Sequence:
        num_blocks = -(-max_tokens // self.block_size)
        return Sequence(self.free_slots.pop(), [self.free_blocks.pop() for _ in range(num_blocks)])

    def release(self, sequence: Sequence) -> None:
        self.free_slots.append(sequence.slot)
        self.free_blocks.extend(sequence.blocks)

    def step(self, parts: SequenceOf[tuple[Sequence, SequenceOf[int]]]) -> list[torch.Tensor]:
        """One forward of new tokens for each sequence; logits [tokens, vocab] of each."""
        batch = self.batch(parts)
        logits = self.model.forward(batch, self.cache, self.exchange)
        return list(logits.split(batch.query_lens)) if parts else []

    def batch(self, parts: SequenceOf[tuple[Sequence, SequenceOf[int]]]) -> ForwardBatch:
        """The step's batch, wanting the logits of every token; the sequences' lengths move on."""
        lengths = [len(tokens) for _, tokens in parts]
        starts = torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()])
        positions = [torch.arange(s.length, s.length + n) for (s, _), n in zip(parts, lengths, strict=True)]
        previous = [self._previous_ids(sequence) for sequence, _ in parts]
        for sequence, tokens in parts:
            sequence.token_ids[sequence.length :] = tokens
            sequence.length += len(tokens)
        widest = max((len(s.blocks) for s, _ in parts), default=0)
        tables = [s.blocks + [-1] * (widest - len(s.blocks)) for s, _ in parts]
        return ForwardBatch(
            token_ids=torch.tensor([token for _, tokens in parts for token in tokens], dtype=torch.int64),
            positions=torch.cat(positions) if positions else torch.empty(0, dtype=torch.int64),
            query_starts=starts,
            context_lens=torch.tensor([s.length for s, _ in parts], dtype=torch.int64),
            block_tables=torch.tensor(tables, dtype=torch.int32).view(len(parts), widest),
            state_slots=torch.tensor([s.slot for s, _ in parts], dtype=torch.int64),
            logit_rows=torch.arange(sum(lengths)),
            query_lens=tuple(lengths),
            max_context_len=max((s.length for s, _ in parts), default=0),
            previous_ids=torch.tensor(previous, dtype=torch.int64).view(len(parts), self.model.num_previous_tokens),
        )

    def _previous_ids(self, sequence: Sequence) -> list[int]:
        """What the model wants to know of the tokens before the sequence's next one: -1 before its start."""
        wanted = range(sequence.length - self.model.num_previous_tokens, sequence.length)
        return [sequence.token_ids[position] if position >= 0 else -1 for position in wanted]

    def prompt(self, tokens: SequenceOf[int], chunks: SequenceOf[int] | None = None) -> torch.Tensor:
        """Logits of every position of one sequence, run in chunks of the given sizes (repeated as needed)."""
        sequence = self.sequence(len(tokens))
        outputs, done = [], 0
        sizes = list(chunks or [len(tokens)])
        while done < len(tokens):
            size = sizes[len(outputs) % len(sizes)]
            outputs += self.step([(sequence, tokens[done : done + size])])
            done += size
        self.release(sequence)
        return torch.cat(outputs)


def random_tokens(length: int, seed: int, vocab_size: int = 272) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, vocab_size) for _ in range(length)]


@torch.inference_mode()
def reference_logits(reference: torch.nn.Module, tokens: SequenceOf[int]) -> torch.Tensor:
    """transformers' logits of every position, [tokens, vocab]."""
    logits: torch.Tensor = reference(torch.tensor([list(tokens)])).logits[0]
    return logits


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    """Equal within the tolerance at every position, NaN nowhere; the message names the worst row."""
    assert actual.shape == expected.shape
    errors = (actual - expected).abs().amax(dim=-1)
    worst = int(errors.argmax())
    assert bool((errors <= tolerance).all()), f"row {worst} of {len(errors)} is off by {float(errors[worst])}"


def assert_mostly_close(actual: torch.Tensor, expected: torch.Tensor, *, share: float, tolerance: float = 1e-4) -> None:
    """For models that round on the way: what lies between two numbers may go either way, and changes all that follows.

    So this share of the positions is equal within the tolerance. Texts are short, that such a step spoils few.
    """
    assert actual.shape == expected.shape
    errors = (actual - expected).abs().amax(dim=-1)
    assert float((errors <= tolerance).float().mean()) >= share, errors.tolist()
