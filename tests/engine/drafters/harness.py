"""A main model and its drafter over caches that are full of NaN before anything is written."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
from tests.engine.model.harness import PagedRun, Sequence

from headrace_engine.kv.layout import allocate_cache
from headrace_engine.models.deepseek_v4.model import DeepseekV4
from headrace_engine.models.deepseek_v41.model import DeepseekV41
from headrace_engine.models.drafter import Drafter, Drafts

NUM_SLOTS = 12


class DraftRun:
    def __init__(self, model: DeepseekV4 | DeepseekV41, drafter: Drafter, seed: int = 0) -> None:
        self.main = PagedRun(model, num_blocks=96, num_slots=NUM_SLOTS, seed=seed)
        self.model, self.drafter = model, drafter
        self.cache = allocate_cache(drafter.cache_groups, 8, 1, NUM_SLOTS)
        for tensor in self.cache.values():
            tensor.fill_(torch.nan)

    def sequence(self) -> Sequence:
        return self.main.sequence(64)

    def step(
        self,
        parts: SequenceOf[tuple[Sequence, SequenceOf[int], int]],
        wanted: SequenceOf[int] | None = None,
    ) -> Drafts:
        """One step of (sequence, its new tokens, the token after them); drafts for all sequences, or the wanted."""
        batch = self.main.batch([(sequence, tokens) for sequence, tokens, _ in parts])
        tap = self.drafter.tap()
        self.model.forward(batch, self.main.cache, self.main.exchange, tap)
        following = [token for _, tokens, last in parts for token in [*tokens[1:], last]]
        return self.drafter.draft(
            batch,
            tap.features(),
            torch.tensor(following, dtype=torch.int64),
            torch.tensor(range(len(parts)) if wanted is None else wanted, dtype=torch.int64),
            self.cache,
            self.main.exchange,
        )

    def verify(self, sequence: Sequence, tokens: SequenceOf[int], num_accepted: int, last: int) -> Drafts:
        """The main model runs all of `tokens`, but only the first ones stay, and `last` follows them.

        Its own cache is put back and computed anew: what it must do about rejected drafts is not tested here.
        """
        before, length = {name: tensor.clone() for name, tensor in self.main.cache.items()}, sequence.length
        tap = self.drafter.tap()
        self.model.forward(self.main.batch([(sequence, tokens)]), self.main.cache, self.main.exchange, tap)
        self.main.cache.update(before)
        sequence.length = length
        batch = self.main.batch([(sequence, tokens[:num_accepted])])
        self.model.forward(batch, self.main.cache, self.main.exchange)
        following = torch.tensor([*tokens[1:num_accepted], last])
        features = tap.features()[:num_accepted]
        return self.drafter.draft(batch, features, following, torch.tensor([0]), self.cache, self.main.exchange)
