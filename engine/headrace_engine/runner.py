"""Runs a step: the rows that the scheduler chose become one flat batch, the model's logits become tokens.

The only owner of the cache tensors' content on this rank besides the transfer. All host buffers are kept from step to
step, and a sequence's block table is kept with its state slot and only appended to, since what happens here between two
forwards is time in which nothing is computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from headrace_engine.core import TokenScore
from headrace_engine.ep.exchange import Exchange
from headrace_engine.models.protocol import ForwardBatch, GroupKind, Model, ReadsAhead
from headrace_engine.sampling.sampler import Sampler
from headrace_engine.sampling.scores import score
from headrace_engine.sequence import MAX_SCORED_PER_STEP, Row, StepOutput
from headrace_engine.sequence import Sequence as EngineSequence


class Runner:
    """One rank's model and cache."""

    def __init__(
        self,
        model: Model,
        cache: Mapping[str, torch.Tensor],
        exchange: Exchange,
        *,
        max_batch_tokens: int,
        max_sequences: int,
        max_blocks: int,
        num_slots: int,
    ) -> None:
        """max_blocks: of the longest sequence. Cache tensors are [num_blocks or num_slots, ...] by cache group."""
        self._model = model
        self._cache = cache
        self._exchange = exchange
        self._sampler = Sampler(model.eos_token_ids)
        self._state_tensors = [cache[g.name] for g in model.cache_groups if g.kind is GroupKind.STATE]
        self._paged_tensors = [cache[g.name] for g in model.cache_groups if g.kind is GroupKind.PAGED]
        self._tokens = _Buffer(max_batch_tokens)
        self._positions = _Buffer(max_batch_tokens)
        self._starts = _Buffer(max_sequences + 1)
        self._context_lens = _Buffer(max_sequences)
        self._slots = _Buffer(max_sequences)
        self._logit_rows = _Buffer(max_sequences + MAX_SCORED_PER_STEP)
        self._previous = np.empty((max_sequences, model.num_previous_tokens), dtype=np.int64)
        self._tables = np.zeros((num_slots, max_blocks), dtype=np.int32)  # by state slot
        self._table_sources: list[list[int] | None] = [None] * num_slots  # whose block ids a table row has
        self._table_lens = [0] * num_slots

    def expect(self, token_ids: Sequence[int]) -> None:
        """A prompt that will be computed sooner or later. Returns at once."""
        if isinstance(self._model, ReadsAhead):
            self._model.read_ahead(token_ids)

    def copy_slots(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy per-sequence state between slots, in order."""
        for source, destination in copies:
            for tensor in self._state_tensors:
                tensor[destination].copy_(tensor[source])

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of every paged group, in order."""
        for source, destination in copies:
            for tensor in self._paged_tensors:
                tensor[destination].copy_(tensor[source])

    @torch.inference_mode()
    def run(self, rows: Sequence[Row]) -> StepOutput:
        """One forward, and what its rows ask of it. No rows: join the group's collectives only."""
        logits = self._model.forward(self._batch(rows), self._cache, self._exchange)
        sequences = [row.sequence for row in rows if row.samples]
        if len(logits) == len(sequences):
            token_ids, scores = self._sampler.sample(logits, sequences) if sequences else ([], {})
            return StepOutput(token_ids, scores)
        return self._run_scored(logits, rows, sequences)

    def _run_scored(self, logits: torch.Tensor, rows: Sequence[Row], sequences: Sequence[EngineSequence]) -> StepOutput:
        """As `run` for a step that scores prompt tokens: their logits come before the row's own."""
        sampled: list[int] = []
        prompt_scores: dict[int, list[TokenScore]] = {}
        first = 0
        for index, row in enumerate(rows):
            scored, sequence = row.scored, row.sequence
            if scored:
                followers = sequence.token_ids[scored.start + 1 : scored.stop + 1]
                num_top = sequence.sampling.num_prompt_logprobs or 0
                prompt_scores[index] = score(logits[first : first + len(scored)], followers, num_top)
                first += len(scored)
            if row.samples:
                sampled.append(first)
                first += 1
        token_ids, scores = self._sampler.sample(logits[sampled], sequences) if sequences else ([], {})
        return StepOutput(token_ids, scores, prompt_scores)

    def _batch(self, rows: Sequence[Row]) -> ForwardBatch:
        num_tokens = num_logits = max_context = max_blocks = 0
        starts, contexts, slots = self._starts.host, self._context_lens.host, self._slots.host
        starts[0] = 0
        for i, row in enumerate(rows):
            sequence, first = row.sequence, row.sequence.num_computed
            end = first + row.num_tokens
            after = num_tokens + row.num_tokens
            if row.num_tokens == 1:
                self._tokens.host[num_tokens] = sequence.token_ids[first]
                self._positions.host[num_tokens] = first
            else:
                self._tokens.host[num_tokens:after] = sequence.token_ids[first:end]
                self._positions.host[num_tokens:after] = np.arange(first, end)
            num_tokens = after
            starts[i + 1] = num_tokens
            contexts[i] = end
            slots[i] = sequence.state_slot
            for position in row.scored:
                self._logit_rows.host[num_logits] = num_tokens - end + position
                num_logits += 1
            if row.samples:
                self._logit_rows.host[num_logits] = num_tokens - 1
                num_logits += 1
            if self._previous.shape[1]:
                self._fill_previous(i, sequence.token_ids, first)
            self._update_table(sequence)
            max_context = max(max_context, end)
            max_blocks = max(max_blocks, len(sequence.block_ids))
        num_rows = len(rows)
        return ForwardBatch(
            token_ids=self._tokens.device[:num_tokens],
            positions=self._positions.device[:num_tokens],
            query_starts=self._starts.device[: num_rows + 1],
            context_lens=self._context_lens.device[:num_rows],
            block_tables=torch.from_numpy(self._tables[slots[:num_rows], :max_blocks]),
            state_slots=self._slots.device[:num_rows],
            logit_rows=self._logit_rows.device[:num_logits],
            query_lens=tuple(row.num_tokens for row in rows),
            max_context_len=max_context,
            previous_ids=torch.from_numpy(self._previous[:num_rows]),
        )

    def _fill_previous(self, row: int, token_ids: Sequence[int], first: int) -> None:
        """The ids before position `first`, -1 where that is before the sequence."""
        width = self._previous.shape[1]
        known = token_ids[max(0, first - width) : first]
        self._previous[row, : width - len(known)] = -1
        self._previous[row, width - len(known) :] = known

    def _update_table(self, sequence: EngineSequence) -> None:
        slot, block_ids = sequence.state_slot, sequence.block_ids
        if self._table_sources[slot] is not block_ids:  # a new owner, or one that was admitted again
            self._table_sources[slot] = block_ids
            self._table_lens[slot] = 0
        num_known = self._table_lens[slot]
        if num_known != len(block_ids):
            self._tables[slot, num_known : len(block_ids)] = block_ids[num_known:]
            self._table_lens[slot] = len(block_ids)


class _Buffer:
    """A host array and the tensor over the same memory."""

    def __init__(self, size: int) -> None:
        self.host = np.zeros(size, dtype=np.int64)
        self.device = torch.from_numpy(self.host)
