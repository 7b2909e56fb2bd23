"""A deterministic model that is no neural network: the next token depends on every earlier token, through the cache.

The paged group keeps each token at its place, the state group keeps a running sum; a token that was not written, or
was written to the wrong block or slot, changes everything after it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from headrace_engine.models.protocol import CacheGroup, ForwardBatch, GroupKind, Holds

VOCAB = 272  # the tiny tokenizer's
EOS = 1


def next_token(token_ids: Sequence[int]) -> int:
    """What the toy generates after these tokens."""
    weighted = sum((i + 1) * t for i, t in enumerate(token_ids))
    return (weighted * 7 + 3 * sum(token_ids)) % (VOCAB - 16) + 16


def expected(prompt: Sequence[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class ToyModel:
    """Implements models.protocol.Model."""

    cache_groups = (
        CacheGroup("tokens", GroupKind.PAGED, (0,), 1, "float32", holds=Holds.COMPRESSED),
        CacheGroup("sum", GroupKind.STATE, (0,), 1, "float32", rows=1, holds=Holds.CARRY),
    )
    vocab_size = VOCAB
    max_position = 256
    eos_token_ids = (EOS,)
    block_multiple = 4
    num_previous_tokens = 3
    digest = "toy"

    def __init__(self, block_size: int, step_seconds: float = 0.0) -> None:
        self._block_size = block_size
        self._step_seconds = step_seconds

    def forward(self, batch: ForwardBatch, cache: Mapping[str, torch.Tensor], exchange: object) -> torch.Tensor:
        time.sleep(self._step_seconds)
        starts = batch.query_starts.tolist()
        wanted = {row: i for i, row in enumerate(batch.logit_rows.tolist())}
        logits = torch.zeros(len(wanted), VOCAB)
        for s, length in enumerate(batch.query_lens):
            end = int(batch.context_lens[s])
            table, slot = batch.block_tables[s].tolist(), int(batch.state_slots[s])
            total = cache["sum"][slot, 0, 0, 0]
            if end == length:
                total.zero_()
            for i in range(length):
                position = int(batch.positions[starts[s] + i])
                assert position == end - length + i
                token = batch.token_ids[starts[s] + i]
                if i == 0 and batch.previous_ids is not None:
                    assert batch.previous_ids[s].tolist() == self._previous(cache["tokens"], table, position)
                cache["tokens"][table[position // self._block_size], 0, position % self._block_size, 0] = token
                total += token
                if starts[s] + i in wanted:
                    next_id = self._follower(cache["tokens"], table, position + 1, int(total))
                    logits[wanted[starts[s] + i], next_id] = 1.0
        return logits

    def _previous(self, tokens: torch.Tensor, table: list[int], first: int) -> list[int]:
        """The ids before position `first`, which a real model may ask for: the cache has them here."""
        known = [-1] * self.num_previous_tokens
        for position in range(max(0, first - self.num_previous_tokens), first):
            known.append(int(tokens[table[position // self._block_size], 0, position % self._block_size, 0]))
        return known[len(known) - self.num_previous_tokens :]

    def _follower(self, tokens: torch.Tensor, table: list[int], num_tokens: int, total: int) -> int:
        weighted = 0
        for position in range(num_tokens):
            block = table[position // self._block_size]
            weighted += (position + 1) * int(tokens[block, 0, position % self._block_size, 0])
        return (weighted * 7 + 3 * total) % (VOCAB - 16) + 16
