"""A step's logits to a step's tokens, with all that the requests ask for.

What a request needs beyond its logits (how often it has said what) is derived from its tokens, kept beside them for as
long as the sequence lives, and survives a preemption.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch

from headrace_engine.sampling.adjust import add_biases, forbid, penalize
from headrace_engine.sampling.counts import TokenCounts
from headrace_engine.sampling.draw import Draw, choose
from headrace_engine.sequence import Sequence as EngineSequence


class Sampler:
    """One rank's. eos_token_ids: the tokens that end an answer of this model."""

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._counts: WeakKeyDictionary[EngineSequence, TokenCounts] = WeakKeyDictionary()

    def sample(self, logits: torch.Tensor, sequences: Sequence[EngineSequence]) -> list[int]:
        """The next token of each sequence, or draw.NOT_FINITE. May overwrite logits [R, vocab] (fp32)."""
        adjusted = [(row, sequence) for row, sequence in enumerate(sequences) if sequence.adjusts_logits]
        if adjusted:
            self._adjust(logits, adjusted)
        return choose(logits, [Draw(sequence.sampling, len(sequence.token_ids)) for sequence in sequences])

    def _adjust(self, logits: torch.Tensor, adjusted: Sequence[tuple[int, EngineSequence]]) -> None:
        add_biases(logits, ((row, sequence.sampling.logit_bias) for row, sequence in adjusted))
        forbid(
            logits,
            (
                (row, (*self._eos_token_ids, *sequence.sampling.stop_token_ids))
                for row, sequence in adjusted
                if sequence.num_generated < sequence.sampling.min_tokens
            ),
        )
        penalize(
            logits,
            [
                (row, sequence.sampling, self._counts_of(sequence))
                for row, sequence in adjusted
                if sequence.sampling.has_penalties
            ],
        )

    def _counts_of(self, sequence: EngineSequence) -> TokenCounts:
        counts = self._counts.get(sequence)
        if counts is None:
            counts = TokenCounts(sequence.token_ids[: sequence.num_prompt_tokens])
            self._counts[sequence] = counts
        counts.update(sequence.token_ids)
        return counts
