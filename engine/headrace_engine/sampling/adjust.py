"""What requests ask to be done to logits before a token is chosen: biases, forbidden and forced tokens, penalties.

The order and the meaning are vLLM's: biases first; then, for tokens of prompt and answer, the repetition penalty (a
positive logit is divided by it, a negative one multiplied); then, for tokens of the answer, frequency_penalty times
their number and presence_penalty once. Every kind is one scatter for all rows of a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from headrace_engine.core import SamplingParams
from headrace_engine.sampling.counts import TokenCounts


def add_biases(logits: torch.Tensor, biases: Iterable[tuple[int, Sequence[tuple[int, float]]]]) -> None:
    """In place. biases: (row of logits [R, vocab], its (token, bias) pairs)."""
    flat = [(row, token, bias) for row, pairs in biases for token, bias in pairs]
    if flat:
        rows, tokens, values = zip(*flat, strict=True)
        logits.index_put_((torch.tensor(rows), torch.tensor(tokens)), torch.tensor(values), accumulate=True)


def forbid(logits: torch.Tensor, forbidden: Iterable[tuple[int, Iterable[int]]]) -> None:
    """In place. forbidden: (row of logits [R, vocab], the tokens that it must not become)."""
    flat = [(row, token) for row, tokens in forbidden for token in tokens]
    if flat:
        rows, tokens = zip(*flat, strict=True)
        logits[torch.tensor(rows), torch.tensor(tokens)] = -torch.inf


def force(logits: torch.Tensor, forced: Iterable[tuple[int, int]]) -> None:
    """In place. forced: (row of logits [R, vocab], the token that it must become, unless that is forbidden)."""
    for row, token in forced:
        value = float(logits[row, token])
        if value != -math.inf:
            logits[row] = -torch.inf
            logits[row, token] = value


def penalize(logits: torch.Tensor, penalized: Sequence[tuple[int, SamplingParams, TokenCounts]]) -> None:
    """In place, for (row of logits [R, vocab], its parameters, what it has so far)."""
    if not penalized:
        return
    lengths = [len(counts.token_ids) for _, _, counts in penalized]
    rows = torch.from_numpy(np.repeat([row for row, _, _ in penalized], lengths))
    tokens = torch.from_numpy(np.concatenate([counts.token_ids for _, _, counts in penalized]))
    num_generated = np.concatenate([counts.num_generated for _, _, counts in penalized])
    repetition = np.repeat([params.repetition_penalty for _, params, _ in penalized], lengths)
    frequency = np.repeat([params.frequency_penalty for _, params, _ in penalized], lengths)
    presence = np.repeat([params.presence_penalty for _, params, _ in penalized], lengths)
    values = logits[rows, tokens].double().numpy()
    values = np.where(values > 0, values / repetition, values * repetition)
    values -= frequency * num_generated + presence * (num_generated > 0)
    logits[rows, tokens] = torch.from_numpy(values).to(logits.dtype)
