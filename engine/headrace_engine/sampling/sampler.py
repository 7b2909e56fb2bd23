"""A step's logits to a step's tokens, with all that the requests ask for.

What a request needs beyond its logits (how often it has said what) is derived from its tokens, kept beside them for as
long as the sequence lives, and survives a preemption.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import torch

from headrace_engine.core import GRAMMAR_FAILED, TokenScore
from headrace_engine.sampling.adjust import add_biases, forbid, force, penalize
from headrace_engine.sampling.counts import TokenCounts
from headrace_engine.sampling.draw import Draw, choose
from headrace_engine.sampling.scores import score
from headrace_engine.sequence import Sequence as EngineSequence


class Sampler:
    """One rank's. eos_token_ids: the tokens that end an answer of this model."""

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._counts: WeakKeyDictionary[EngineSequence, TokenCounts] = WeakKeyDictionary()

    def sample(
        self, logits: torch.Tensor, sequences: Sequence[EngineSequence]
    ) -> tuple[list[int], dict[int, TokenScore]]:
        """The next token of each sequence, or draw.NOT_FINITE, and by row the scores that requests ask for.

        May overwrite logits [R, vocab] (fp32).
        """
        scored = [row for row, sequence in enumerate(sequences) if sequence.sampling.num_logprobs is not None]
        own = logits[scored] if scored else logits  # a copy: scores are of what the model said
        adjusted = [(row, sequence) for row, sequence in enumerate(sequences) if sequence.adjusts_logits]
        failed = self._adjust(logits, adjusted) if adjusted else []
        tokens = choose(logits, [Draw(sequence.sampling, len(sequence.token_ids)) for sequence in sequences])
        for row in failed:
            tokens[row] = GRAMMAR_FAILED
        if not scored:
            return tokens, {}
        num_top = max(sequences[row].sampling.num_logprobs or 0 for row in scored)
        scores = score(own, [max(tokens[row], 0) for row in scored], num_top)
        return tokens, {row: _cut(made, sequences[row]) for row, made in zip(scored, scores, strict=True)}

    def _adjust(self, logits: torch.Tensor, adjusted: Sequence[tuple[int, EngineSequence]]) -> list[int]:
        """In place. Returns rows whose grammar has failed."""
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
        failed = _keep_to_grammars(logits, adjusted)
        late = ((row, sequence.sampling.thought_ends[0]) for row, sequence in adjusted if _thinks_too_long(sequence))
        force(logits, late)
        return failed

    def _counts_of(self, sequence: EngineSequence) -> TokenCounts:
        counts = self._counts.get(sequence)
        if counts is None:
            counts = TokenCounts(sequence.token_ids[: sequence.num_prompt_tokens])
            self._counts[sequence] = counts
        counts.update(sequence.token_ids)
        return counts


def _thinks_too_long(sequence: EngineSequence) -> bool:
    sampling = sequence.sampling
    if sampling.max_thought_tokens is None or sequence.num_generated != sampling.max_thought_tokens:
        return False
    answer = sequence.token_ids[sequence.num_prompt_tokens :]
    return not any(token in answer for token in sampling.thought_ends)


def _keep_to_grammars(logits: torch.Tensor, adjusted: Sequence[tuple[int, EngineSequence]]) -> list[int]:
    """Rule out, in place, what grammars do not allow. Returns rows whose grammar has failed."""
    guided: list[int] = []
    masks: list[np.ndarray] = []
    failed: list[int] = []
    num_words = -(-logits.shape[1] // 32)
    for row, sequence in adjusted:
        if sequence.guide is None or not sequence.guide.follow(sequence.token_ids, sequence.num_prompt_tokens):
            continue
        words = np.zeros(num_words, dtype=np.int32)
        if sequence.guide.allow(words):
            guided.append(row)
            masks.append(words)
        else:
            failed.append(row)
    if guided:
        bits = np.unpackbits(np.stack(masks).view(np.uint8), axis=1, bitorder="little")[:, : logits.shape[1]]
        logits[guided] = logits[guided].masked_fill(torch.from_numpy(bits == 0), -torch.inf)
    return failed


def _cut(made: TokenScore, sequence: EngineSequence) -> TokenScore:
    """With as many likeliest tokens as this request wants, others of the step may want more."""
    return msgspec.structs.replace(made, top=made.top[: sequence.sampling.num_logprobs or 0])
