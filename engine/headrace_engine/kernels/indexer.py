"""The lightning indexer: which compressed entries a query attends (DeepSeek-V4 report, section 2.3)."""

from __future__ import annotations

import torch

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
            best = torch.sort(scores.masked_fill(hidden, -torch.inf), dim=1, descending=True, stable=True)
            chosen = best.indices[:, :topk].where(best.values[:, :topk] > -torch.inf, len(own_keys)).sort(dim=1).values
            selected[rows, : chosen.shape[1]] = chosen.where(chosen < len(own_keys), -1).to(torch.int32)
    return selected


def entry_scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Scores [Q, G] fp32 of q [Q, heads, n] dt, weights [Q, heads] fp32 against keys [G, n] fp32."""
    products = torch.einsum("qhn,gn->qhg", q.float(), keys).relu_()
    return torch.bmm(weights.unsqueeze(1), products).squeeze(1)
