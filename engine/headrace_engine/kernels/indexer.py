"""The lightning indexer: which compressed entries a query attends (DeepSeek-V4 report, section 2.3)."""

from __future__ import annotations

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
    library = library_for(q)
    if library is None or keys.dtype is not q.dtype:
        return select_entries_reference(q, weights, batch, keys, layer, ratio, topk)
    tokens, heads, dim = q.shape
    if not (q.is_contiguous() and keys.shape[3] == dim):
        raise ValueError(f"select_entries: q must be contiguous, keys of {dim}")
    if not (weights.dtype is torch.float32 and weights.shape == (tokens, heads) and weights.is_contiguous()):
        raise ValueError(f"select_entries: weights must be contiguous fp32 [{tokens}, {heads}]")
    selected = torch.empty((tokens, topk), dtype=torch.int32)
    library.headrace_select_entries(
        q.dtype is torch.bfloat16, q.data_ptr(), weights.data_ptr(), batch.query_starts.data_ptr(),
        batch.context_lens.data_ptr(), batch.block_tables.data_ptr(), len(batch.query_lens),
        batch.block_tables.shape[1], layer_pointer(keys, layer), keys.stride(0), keys.shape[2],
        heads, dim, ratio, topk, selected.data_ptr(),
    )  # fmt: skip
    return selected


def select_blocks(
    q: torch.Tensor,
    weights: torch.Tensor,
    batch: ForwardBatch,
    keys: torch.Tensor,
    layer: int,
    ratio: int,
    block_size: int,
    num_blocks: int,
) -> torch.Tensor:
    """The best num_blocks runs of block_size entries of each query: [T, num_blocks] int32, ascending, -1 padded.

    A run's score is the best of its visible entries'; the run of the newest visible entry is always among them. The
    first of two levels of selection (DeepSeek-V4.1 report, section 2.3); the rest as for select_entries.
    """
    selected = torch.full((q.shape[0], num_blocks), -1, dtype=torch.int32, device=q.device)
    for s, (start, _, length) in enumerate(sequences(batch)):
        own_keys = paged_rows(keys, layer, batch, s, ratio).float()
        numbers = torch.arange(len(own_keys), device=q.device)
        tile = max(1, _TILE_BYTES // max(1, 4 * q.shape[1] * len(own_keys)))
        for low in range(start, start + length, tile):
            rows = slice(low, min(low + tile, start + length))
            visible = ((batch.positions[rows] + 1) // ratio).unsqueeze(1)
            scores = entry_scores(q[rows], weights[rows], own_keys).masked_fill(numbers >= visible, -torch.inf)
            padded = F.pad(scores, (0, -len(own_keys) % block_size), value=-torch.inf)
            best = padded.view(len(padded), -1, block_size).amax(dim=2)
            newest = torch.arange(best.shape[1], device=q.device) == (visible - 1) // block_size
            chosen = _best(best.masked_fill(newest & (visible > 0), torch.inf), num_blocks)
            selected[rows, : chosen.shape[1]] = chosen
    return selected


def select_within_blocks(
    q: torch.Tensor,
    weights: torch.Tensor,
    batch: ForwardBatch,
    keys: torch.Tensor,
    layer: int,
    ratio: int,
    topk: int,
    blocks: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """select_entries among the entries of the given runs only: blocks [T, B] int32 as from select_blocks."""
    lengths = batch.query_starts.diff()
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=q.device), lengths)
    offsets = torch.arange(block_size, device=q.device)
    per_block = keys.shape[2]
    num_entries = blocks.shape[1] * block_size
    selected = torch.full((q.shape[0], topk), -1, dtype=torch.int32, device=q.device)
    tile = max(1, _TILE_BYTES // (4 * num_entries * (q.shape[1] + q.shape[2])))
    for low in range(0, q.shape[0], tile):
        rows = slice(low, low + tile)
        numbers = (blocks[rows].long().unsqueeze(2) * block_size + offsets).flatten(1)
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
    for s, (start, _, length) in enumerate(sequences(batch)):
        own_keys = paged_rows(keys, layer, batch, s, ratio).float()
        numbers = torch.arange(len(own_keys), device=q.device)
        tile = max(1, _TILE_BYTES // max(1, 4 * q.shape[1] * len(own_keys)))
        for low in range(start, start + length, tile):
            rows = slice(low, min(low + tile, start + length))
            scores = entry_scores(q[rows], weights[rows], own_keys)
            hidden = numbers >= ((batch.positions[rows] + 1) // ratio).unsqueeze(1)
            chosen = _best(scores.masked_fill(hidden, -torch.inf), topk)
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
