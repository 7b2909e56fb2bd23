"""From logits to token ids.

Greedy rows cost one argmax for the whole batch. Other rows draw one uniform number u each and take the first token
whose cumulative probability exceeds u. u is a hash of (seed, position), so that a request's tokens depend on its seed
alone: not on its neighbours in the batch, on chunking, or on having been preempted.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace_engine.core import SamplingParams

NOT_FINITE = -1  # in place of a token: the model's logits are no numbers
_FEW = 1024  # candidates that are sorted first; nearly always they hold top_p of the probability


@dataclass(frozen=True, slots=True)
class Draw:
    """How to choose one row's token. `position`: the index that the new token will have in its sequence."""

    params: SamplingParams
    position: int


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token id for each row of logits [R, vocab] (fp32), or NOT_FINITE."""
    best_values, best = torch.max(logits, dim=-1)
    tokens: list[int] = best.tolist()
    for row, is_finite in enumerate(torch.isfinite(best_values).tolist()):
        if not is_finite:
            tokens[row] = NOT_FINITE
        elif draws[row].params.temperature > 0:
            tokens[row] = _draw(logits[row], draws[row])
    return tokens


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that is the same for the same arguments, everywhere."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed & (2**64 - 1), position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _draw(logits: torch.Tensor, draw: Draw) -> int:
    params = draw.params
    # The largest logit goes to 0 first: a tiny temperature then makes the others -inf rather than everything inf.
    weights = torch.exp((logits - logits.max()).double() / params.temperature)
    candidates: torch.Tensor | None = None  # token of each weight, None: the weight's own index
    if params.top_k or params.top_p < 1:
        weights, candidates = _truncate(weights, params.top_k, params.top_p)
    cumulative = torch.cumsum(weights, dim=0)
    threshold = uniform(params.seed or 0, draw.position) * cumulative[-1]
    index = int(torch.searchsorted(cumulative, threshold, right=True))
    index = min(index, len(weights) - 1)
    return index if candidates is None else int(candidates[index])


def _truncate(weights: torch.Tensor, top_k: int, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The heaviest tokens, heaviest first: at most top_k, and the fewest that hold top_p of what top_k left."""
    num_kept = min(top_k or len(weights), len(weights))
    total = weights.sum()
    num_sorted = num_kept if top_k else min(_FEW, num_kept)
    top, candidates = torch.topk(weights, num_sorted)
    if top_k:
        total = top.sum()
    elif top.sum() < top_p * total:
        top, candidates = torch.sort(weights, descending=True)
    if top_p < 1:
        before = torch.cumsum(top, dim=0) - top  # probability mass of heavier tokens
        num_kept = max(1, int((before < top_p * total).sum()))
        top, candidates = top[:num_kept], candidates[:num_kept]
    return top, candidates
