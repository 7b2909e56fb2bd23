"""From logits to token ids.

Greedy rows cost one argmax for the whole batch. Other rows draw one uniform number u each and take the first token
whose cumulative probability exceeds u. u is a hash of (seed, position), so that a request's tokens depend on its seed
alone: not on its neighbours in the batch, on chunking, or on having been preempted.

Rows are drawn together where they need the same number of sorted candidates. Rows of another number are another group,
rather than all of them sorted to the largest: equal logits come in an order that depends on that number.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from headrace_engine.core import NOT_FINITE, SamplingParams

_LEAST_TEMPERATURE = 1e-7  # fp32 has no room for much less, and nothing but the largest logit is left long before
_BLOCK = 512  # tokens that are summed before anything is accumulated
_FEW = 1024  # candidates that are sorted first; nearly always they hold top_p of the probability


@dataclass(frozen=True, slots=True)
class Draw:
    """How to choose one row's token. `position`: the index that the new token will have in its sequence."""

    params: SamplingParams
    position: int


def choose(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token id for each row of logits [R, vocab] (fp32), or NOT_FINITE."""
    largest, best = torch.max(logits, dim=-1)
    tokens: list[int] = best.tolist()
    random: list[int] = []
    for row, is_finite in enumerate(torch.isfinite(largest).tolist()):
        if not is_finite:
            tokens[row] = NOT_FINITE
        elif draws[row].params.temperature > 0:
            random.append(row)
    if random:
        rows = slice(None) if len(random) == len(tokens) else random
        drawn = _draw(logits[rows], largest[rows], [draws[row] for row in random])
        for row, token in zip(random, drawn, strict=True):
            tokens[row] = token
    return tokens


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that is the same for the same arguments, everywhere."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed & (2**64 - 1), position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _draw(logits: torch.Tensor, largest: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """Tokens of rows [R, vocab] that all have a temperature above 0. largest: [R]."""
    groups: dict[int, list[int]] = defaultdict(list)  # by number of sorted candidates; 0: all, unsorted
    for row, draw in enumerate(draws):
        groups[_num_sorted(draw.params, logits.shape[1])].append(row)
    tokens = [0] * len(draws)
    for num_sorted, rows in groups.items():
        own = logits if len(groups) == 1 else logits[rows]
        own_draws = [draws[row] for row in rows]
        draw_group = _draw_sorted if num_sorted else _draw_from_all
        for row, token in zip(rows, draw_group(own, largest[rows], own_draws, num_sorted), strict=True):
            tokens[row] = token
    return tokens


def _num_sorted(params: SamplingParams, vocab_size: int) -> int:
    if params.top_k:
        return min(params.top_k, vocab_size)
    return min(_FEW, vocab_size) if params.top_p < 1 else 0


def _draw_from_all(logits: torch.Tensor, largest: torch.Tensor, draws: Sequence[Draw], _: int) -> list[int]:
    """Without sorting: first the block of tokens in which the number falls, then the token in the block."""
    weights = _weights(logits, largest, draws)
    num_rows, vocab_size = weights.shape
    block_size = math.gcd(vocab_size, _BLOCK)
    blocks = weights.view(num_rows, -1, block_size)
    cumulative = torch.cumsum(blocks.sum(-1).double(), dim=-1)
    threshold = _thresholds(cumulative, draws)
    block = torch.searchsorted(cumulative, threshold, right=True)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp_(min=0)), 0)
    inner = blocks[torch.arange(num_rows), block[:, 0]].double()
    within = torch.cumsum(inner, dim=-1)
    # The sum of a block and its running sum may differ in their last bits: stay within the block's tokens.
    rest = torch.minimum(threshold - before, _just_below(within[:, -1:]))
    index = torch.searchsorted(within, rest, right=True)
    tokens: list[int] = (block * block_size + index)[:, 0].tolist()
    return tokens


def _draw_sorted(logits: torch.Tensor, largest: torch.Tensor, draws: Sequence[Draw], num_sorted: int) -> list[int]:
    """From the likeliest tokens, likeliest first. top_p counts in what top_k has left; without top_k in everything."""
    top, candidates = torch.topk(logits, num_sorted)
    top = _weights(top, largest, draws).double()
    mass = top.sum(-1, keepdim=True)
    has_top_k = torch.tensor([[draw.params.top_k > 0] for draw in draws])
    totals = mass if bool(has_top_k.all()) else _weights(logits, largest, draws).sum(-1, keepdim=True).double()
    wanted = torch.where(has_top_k, mass, totals) * _column(draw.params.top_p for draw in draws)
    picked = _pick(_keep_mass(top, wanted), draws)
    tokens: list[int] = candidates.gather(1, picked)[:, 0].tolist()
    for row in ((mass < wanted) & ~has_top_k)[:, 0].nonzero()[:, 0].tolist():  # a flat distribution: sort all of it
        own = slice(row, row + 1)
        ordered, candidates = torch.sort(logits[own], dim=-1, descending=True)
        weights = _weights(ordered, largest[own], draws[own]).double()
        tokens[row] = int(candidates[0, _pick(_keep_mass(weights, wanted[own]), draws[own])])
    return tokens


def _weights(logits: torch.Tensor, largest: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Unnormalized probabilities [R, K] after temperature and min_p; the largest of a row's vocabulary is 1."""
    # The largest logit goes to 0 first: a tiny temperature then makes the others -inf rather than everything inf.
    temperatures = _column(max(draw.params.temperature, _LEAST_TEMPERATURE) for draw in draws).float()
    weights = (logits - largest[:, None]).div_(temperatures).exp_()
    if any(draw.params.min_p for draw in draws):
        weights.masked_fill_(weights < _column(draw.params.min_p for draw in draws).float(), 0)
    return weights


def _keep_mass(ordered: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Of weights in falling order [R, K] the fewest that hold the mass `wanted` [R, 1], at least one; others are 0."""
    before = torch.cumsum(ordered, dim=-1) - ordered
    is_kept = before < wanted
    is_kept[:, 0] = True
    return ordered * is_kept


def _pick(weights: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """The index [R, 1] of each row [R, K] at which its uniform number falls; its weight is above 0."""
    cumulative = torch.cumsum(weights, dim=-1)
    return torch.searchsorted(cumulative, _thresholds(cumulative, draws), right=True)


def _thresholds(cumulative: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Each row's uniform number as a part of its total [R, 1], below it even when the product rounds up to it."""
    total = cumulative[:, -1:]
    numbers = _column(uniform(draw.params.seed or 0, draw.position) for draw in draws)
    return torch.minimum(numbers * total, _just_below(total))


def _just_below(values: torch.Tensor) -> torch.Tensor:
    return torch.nextafter(values, torch.zeros_like(values))


def _column(values: Iterable[float]) -> torch.Tensor:
    """Numbers of rows as [R, 1] in fp64."""
    return torch.tensor([[value] for value in values], dtype=torch.float64)
