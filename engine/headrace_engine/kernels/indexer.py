"""The lightning indexer: which compressed entries a query attends (DeepSeek-V4 report, section 2.3)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from headrace_engine.kernels.native import library_for
from headrace_engine.kernels.shared_kv_attention import layer_pointer, paged_rows, sequences
from headrace_engine.models.protocol import ForwardBatch

_TILE_BYTES = 32 * 2**20  # of the reference's largest temporary


def select_entries(
    q: torch.Tensor,
    weights: torch.Tensor,
    batch: ForwardBatch,
    keys: torch.Tensor,
    layer: int,
    ratio: int,
    topk: int,
) -> torch.Tensor:
    """The best topk entries of each query among those it sees: [T, topk] int32, ascending, -1 padded.

    score(t, g) = sum over heads of weights[t, h] * relu(q[t, h] . key[g]); all entries below (position + 1) // ratio
    where these are at most topk. q [T, heads, n] dt; weights [T, heads] fp32; keys [blocks, layers, entries per block,
    n]. Among equal scores the lower number wins.
    """
    if _library(q, keys) is None:
        return select_entries_reference(q, weights, batch, keys, layer, ratio, topk)
    selected = torch.empty((q.shape[0], topk), dtype=torch.int32)
    _native_select(q, weights, batch, keys, layer, ratio, selected, None, 1, is_within=False)
    return selected


def select_entries_and_runs(
    q: torch.Tensor,
    weights: torch.Tensor,
    batch: ForwardBatch,
    keys: torch.Tensor,
    layer: int,
    ratio: int,
    topk: int,
    run_size: int,
    num_runs: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """select_entries, and from its scores the best num_runs runs of run_size entries: [T, num_runs] int32 likewise.

    A run's score is the best of its visible entries'; the run of the newest visible entry is always among them. The
    first of two levels of selection (DeepSeek-V4.1 report, section 2.3).
    """
    if _library(q, keys) is None:
        return select_entries_and_runs_reference(q, weights, batch, keys, layer, ratio, topk, run_size, num_runs)
    selected = torch.empty((q.shape[0], topk), dtype=torch.int32)
    runs = torch.empty((q.shape[0], num_runs), dtype=torch.int32)
    _native_select(q, weights, batch, keys, layer, ratio, selected, runs, run_size, is_within=False)
    return selected, runs


def select_within_runs(
    q: torch.Tensor,
    weights: torch.Tensor,
    batch: ForwardBatch,
    keys: torch.Tensor,
    layer: int,
    ratio: int,
    topk: int,
    runs: torch.Tensor,
    run_size: int,
) -> torch.Tensor:
    """select_entries among the entries of the given runs only: runs [T, B] int32 as from select_entries_and_runs."""
    if _library(q, keys) is None:
        return select_within_runs_reference(q, weights, batch, keys, layer, ratio, topk, runs, run_size)
    selected = torch.empty((q.shape[0], topk), dtype=torch.int32)
    _native_select(q, weights, batch, keys, layer, ratio, selected, runs, run_size, is_within=True)
    return selected


def _library(q: torch.Tensor, keys: torch.Tensor) -> Any | None:
    return library_for(q) if keys.dtype is q.dtype else None


def _native_select(
    q: torch.Tensor,
    weights: torch.Tensor,
    batch: ForwardBatch,
    keys: torch.Tensor,
    layer: int,
    ratio: int,
    selected: torch.Tensor,
    runs: torch.Tensor | None,
    run_size: int,
    *,
    is_within: bool,
) -> None:
    """Fills selected [T, topk]; runs [T, B] say where to choose, or are filled too."""
    tokens, heads, dim = q.shape
    if not (q.is_contiguous() and keys.shape[3] == dim):
        raise ValueError(f"select_entries: q must be contiguous, keys of {dim}")
    if not (weights.dtype is torch.float32 and weights.shape == (tokens, heads) and weights.is_contiguous()):
        raise ValueError(f"select_entries: weights must be contiguous fp32 [{tokens}, {heads}]")
    if not (runs is None or (runs.dtype is torch.int32 and len(runs) == tokens and runs.is_contiguous())):
        raise ValueError(f"select_entries: runs must be contiguous int32 [{tokens}, B]")
    library = library_for(q)
    assert library is not None
    library.headrace_select_entries(
        q.dtype is torch.bfloat16, is_within, q.data_ptr(), weights.data_ptr(), batch.query_starts.data_ptr(),
        batch.context_lens.data_ptr(), batch.block_tables.data_ptr(), len(batch.query_lens),
        batch.block_tables.shape[1], layer_pointer(keys, layer), keys.stride(0), keys.shape[2],
        heads, dim, ratio, selected.shape[1], selected.data_ptr(),
        run_size, 0 if runs is None else runs.shape[1], None if runs is None else runs.data_ptr(),
    )  # fmt: skip


def select_entries_reference(
    q: torch.Tensor,
    weights: torch.Tensor,
    batch: ForwardBatch,
    keys: torch.Tensor,
    layer: int,
    ratio: int,
    topk: int,
) -> torch.Tensor:
    selected = torch.full((q.shape[0], topk), -1, dtype=torch.int32, device=q.device)
    for rows, _, scores in _scored_tiles(q, weights, batch, keys, layer, ratio):
        _fill_best(selected, rows, scores)
    return selected


def select_entries_and_runs_reference(
    q: torch.Tensor,
    weights: torch.Tensor,
    batch: ForwardBatch,
    keys: torch.Tensor,
    layer: int,
    ratio: int,
    topk: int,
    run_size: int,
    num_runs: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    selected = torch.full((q.shape[0], topk), -1, dtype=torch.int32, device=q.device)
    runs = torch.full((q.shape[0], num_runs), -1, dtype=torch.int32, device=q.device)
    for rows, visible, scores in _scored_tiles(q, weights, batch, keys, layer, ratio):
        _fill_best(selected, rows, scores)
        padded = F.pad(scores, (0, -scores.shape[1] % run_size), value=-torch.inf)
        best = padded.view(len(padded), -1, run_size).amax(dim=2)
        newest = torch.arange(best.shape[1], device=q.device) == (visible - 1) // run_size
        _fill_best(runs, rows, best.masked_fill(newest & (visible > 0), torch.inf))
    return selected, runs


def _scored_tiles(
    q: torch.Tensor, weights: torch.Tensor, batch: ForwardBatch, keys: torch.Tensor, layer: int, ratio: int
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """(rows of one sequence, how many entries each sees [Q, 1], scores [Q, G] fp32, -inf of those it does not see)."""
    for s, (start, _, length) in enumerate(sequences(batch)):
        own_keys = paged_rows(keys, layer, batch, s, ratio).float()
        numbers = torch.arange(len(own_keys), device=q.device)
        tile = max(1, _TILE_BYTES // max(1, 4 * q.shape[1] * len(own_keys)))
        for low in range(start, start + length, tile):
            rows = slice(low, min(low + tile, start + length))
            visible = ((batch.positions[rows] + 1) // ratio).unsqueeze(1)
            scores = entry_scores(q[rows], weights[rows], own_keys)
            yield rows, visible, scores.masked_fill(numbers >= visible, -torch.inf)


def _fill_best(places: torch.Tensor, rows: slice, scores: torch.Tensor) -> None:
    """places [T, k] int32: those of the best scores of some rows."""
    chosen = _best(scores, places.shape[1])
    places[rows, : chosen.shape[1]] = chosen


def select_within_runs_reference(
    q: torch.Tensor,
    weights: torch.Tensor,
    batch: ForwardBatch,
    keys: torch.Tensor,
    layer: int,
    ratio: int,
    topk: int,
    runs: torch.Tensor,
    run_size: int,
) -> torch.Tensor:
    lengths = batch.query_starts.diff()
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=q.device), lengths)
    offsets = torch.arange(run_size, device=q.device)
    per_block = keys.shape[2]
    num_entries = runs.shape[1] * run_size
    selected = torch.full((q.shape[0], topk), -1, dtype=torch.int32, device=q.device)
    tile = max(1, _TILE_BYTES // (4 * num_entries * (q.shape[1] + q.shape[2])))
    for low in range(0, q.shape[0], tile):
        rows = slice(low, low + tile)
        numbers = (runs[rows].long().unsqueeze(2) * run_size + offsets).flatten(1)
        hidden = (numbers < 0) | (numbers >= ((batch.positions[rows] + 1) // ratio).unsqueeze(1))
        numbers = numbers.masked_fill(hidden, 0)
        pages = batch.block_tables[sequence[rows].unsqueeze(1), numbers // per_block].long()
        own_keys = keys[pages, layer, numbers % per_block].float()
        products = torch.einsum("qhn,qgn->qhg", q[rows].float(), own_keys).relu_()
        scores = torch.bmm(weights[rows].unsqueeze(1), products).squeeze(1)
        places = _best(scores.masked_fill(hidden, -torch.inf), topk).long()
        chosen = numbers.gather(1, places.clamp(min=0)).to(torch.int32).where(places >= 0, -1)
        selected[rows, : chosen.shape[1]] = chosen
    return selected


def _best(scores: torch.Tensor, topk: int) -> torch.Tensor:
    """Places of each row's topk best scores above -inf: [Q, at most topk] int32, ascending, -1 padded."""
    width = scores.shape[1]
    best = torch.sort(scores, dim=1, descending=True, stable=True)
    places = best.indices[:, :topk].where(best.values[:, :topk] > -torch.inf, width).sort(dim=1).values
    return places.where(places < width, -1).to(torch.int32)


def entry_scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Scores [Q, G] fp32 of q [Q, heads, n] dt, weights [Q, heads] fp32 against keys [G, n] fp32."""
    products = torch.einsum("qhn,gn->qhg", q.float(), keys).relu_()
    return torch.bmm(weights.unsqueeze(1), products).squeeze(1)
