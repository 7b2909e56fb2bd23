"""Bounded replay, an approximation that DeepSeek-V4.1 is trained for (report, on bounded replay); off unless asked.

Layers above the last kv source feed nothing but their own windows, so of each sequence's rows in a step only the last
`window` run there: half of a long prompt's work. And a prefix hit needs no window rows of the past: the last `window`
tokens before it are run again (`ForwardBatch.replay_lens`), which writes no entries, since those are there and exact.
Where rows are left out, windows begin with the first one that is not.
"""

from __future__ import annotations

import bisect
import dataclasses
from dataclasses import dataclass

import torch

from headrace_engine.models.protocol import ForwardBatch


@dataclass(frozen=True)
class Kept:
    """The rows of a step that run in the layers above the last kv source."""

    rows: torch.Tensor  # [K] of the T rows
    batch: ForwardBatch  # of these alone


def begin(batch: ForwardBatch, block_multiple: int) -> ForwardBatch:
    """The batch with windows that begin where it does, for sequences of which it replays rows.

    Raises ValueError unless what is replayed ends with whole groups of every ratio.
    """
    if batch.replay_lens is None:
        return batch
    if len(batch.replay_lens) != len(batch.query_lens):
        raise ValueError("replay_lens must name a number of rows for each sequence")
    starts = []
    for end, length, replayed in zip(batch.context_lens.tolist(), batch.query_lens, batch.replay_lens, strict=True):
        if not 0 <= replayed < length or (replayed and (end - length + replayed) % block_multiple):
            raise ValueError(
                f"{replayed} replayed rows of {length} before position {end}: fewer than all, up to a multiple of"
                f" {block_multiple}"
            )
        starts.append(end - length if replayed else 0)
    return dataclasses.replace(batch, window_starts=torch.tensor(starts, device=batch.positions.device))


def is_new(batch: ForwardBatch, tokens: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
    """[C] bool of rows [C] and their sequences: not replayed."""
    if batch.replay_lens is None:
        return torch.ones(len(tokens), dtype=torch.bool, device=tokens.device)
    replayed = torch.tensor(batch.replay_lens, dtype=torch.int64, device=tokens.device)
    return tokens >= (batch.query_starts[:-1] + replayed)[sequences]


def keep_last(batch: ForwardBatch, window: int) -> Kept | None:
    """The last `window` rows of each sequence; all of one that wants logits of earlier ones. None: that is all rows."""
    wanted, starts, end = sorted(batch.logit_rows.tolist()), [], 0
    for length in batch.query_lens:
        start, end = end, end + length
        first = max(start, end - window)
        next_wanted = bisect.bisect_left(wanted, start)
        is_needed = next_wanted < len(wanted) and wanted[next_wanted] < first
        starts.append((start if is_needed else first) - start)
    if not any(starts):
        return None
    device = batch.positions.device
    lengths = [length - dropped for length, dropped in zip(batch.query_lens, starts, strict=True)]
    dropped = torch.tensor(starts, dtype=torch.int64, device=device)
    counts = torch.tensor(lengths, dtype=torch.int64, device=device)
    new_starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    shift = (batch.query_starts[:-1] + dropped - new_starts[:-1]).repeat_interleave(counts)
    rows = torch.arange(len(shift), device=device) + shift
    places = torch.full((batch.num_tokens,), -1, dtype=torch.int64, device=device)
    places[rows] = torch.arange(len(rows), device=device)
    earlier = torch.zeros_like(dropped) if batch.window_starts is None else batch.window_starts
    kept = dataclasses.replace(
        batch,
        token_ids=batch.token_ids[rows],
        positions=batch.positions[rows],
        query_starts=new_starts,
        logit_rows=places[batch.logit_rows],
        query_lens=tuple(lengths),
        window_starts=torch.where(dropped > 0, batch.context_lens - counts, earlier),
        previous_ids=None,
        replay_lens=None,
    )
    return Kept(rows, kept)
