"""DeepSeek-V4's attention and indexer products in plain torch, each in two shapes.

`*_rows`: many sequences, one query each (decode); keys are gathered from the cache by row number, -1 for none.
`*_chunk`: one sequence, many queries (prefill); keys are one run of rows.
All are tiled: no temporary grows with queries times keys times heads. Formulas: DeepSeek-V4 report, section 2.3.
"""

from __future__ import annotations

import torch

_TILE_BYTES = 32 * 2**20  # of the largest temporary of one tile
_GATHER_RATIO = 4  # a chunk's sparse choice is gathered per query once the entries outnumber it by more than this


def attend_rows(
    q: torch.Tensor,
    window: torch.Tensor,
    window_rows: torch.Tensor,
    entries: torch.Tensor | None,
    entry_rows: torch.Tensor | None,
    sinks: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """One query per row over its own keys, which are also the values; softmax with a sink logit per head.

    q [D, heads, n] dt; window [rows, n] and entries [rows, n]: flat views of cache tensors (cache dtype);
    window_rows [D, W] and entry_rows [D, K] int64, -1 = none; sinks [heads] fp32. Returns [D, heads, n] dt.
    """
    num_keys = window_rows.shape[1] + (0 if entry_rows is None else entry_rows.shape[1])
    tile = max(1, _TILE_BYTES // (num_keys * max(q.shape[2] * q.element_size(), q.shape[1] * 4)))
    outputs = torch.empty_like(q)
    for start in range(0, q.shape[0], tile):
        part = slice(start, start + tile)
        keys, valid = _gather(window, window_rows[part], q.dtype)
        if entries is not None and entry_rows is not None:
            more_keys, more_valid = _gather(entries, entry_rows[part], q.dtype)
            keys, valid = torch.cat([keys, more_keys], dim=1), torch.cat([valid, more_valid], dim=1)
        logits = torch.bmm(q[part], keys.transpose(1, 2)).float() * scale
        logits.masked_fill_(~valid.unsqueeze(1), -torch.inf)
        outputs[part] = torch.bmm(_softmax_with_sink(logits, sinks).to(q.dtype), keys)
    return outputs


def attend_chunk(
    q: torch.Tensor,
    window_keys: torch.Tensor,
    window: int,
    entries: torch.Tensor | None,
    ratio: int,
    first_position: int,
    selected: torch.Tensor | None,
    sinks: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Consecutive queries of one sequence; returns [Q, heads, n] dt.

    q [Q, heads, n] dt at positions first_position ...; window_keys [P + Q, n] dt: the P rows before the chunk, then its
    own; a query sees its last `window` of them. entries [E, n] dt: query t sees those below (t + 1) // ratio, or of
    them those in `selected` [Q, k] int64 (-1 = none) if given.
    """
    num_queries, num_heads, _ = q.shape
    if entries is not None and selected is not None and entries.shape[0] > _GATHER_RATIO * selected.shape[1]:
        return attend_rows(q, window_keys, _band_rows(q, window_keys, window), entries, selected, sinks, scale)
    num_history = window_keys.shape[0] - num_queries
    num_keys = 2 * window + (0 if entries is None else entries.shape[0])
    tile = max(1, min(window, _TILE_BYTES // (4 * num_heads * num_keys)))
    outputs = torch.empty_like(q)
    for start in range(0, num_queries, tile):
        end = min(start + tile, num_queries)
        low = max(0, start + num_history - window + 1)
        keys = window_keys[low : end + num_history]
        visible = _band_mask(start, end, low, end + num_history, num_history, window, q.device)
        if entries is not None:
            num_visible = (first_position + end) // ratio
            keys = torch.cat([keys, entries[:num_visible]])
            positions = torch.arange(first_position + start, first_position + end, device=q.device)
            chosen = None if selected is None else selected[start:end]
            visible = torch.cat([visible, _entry_mask(positions, num_visible, ratio, chosen)], dim=1)
        logits = (q[start:end].flatten(0, 1) @ keys.T).float().mul_(scale).view(-1, num_heads, keys.shape[0])
        logits.masked_fill_(~visible.unsqueeze(1), -torch.inf)
        probabilities = _softmax_with_sink(logits, sinks).to(q.dtype)
        outputs[start:end] = (probabilities.flatten(0, 1) @ keys).view(-1, num_heads, keys.shape[1])
    return outputs


def index_rows(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, key_rows: torch.Tensor, topk: int
) -> torch.Tensor:
    """The indexer's choice for one query per row: entry numbers [D, min(topk, E)] int64, -1 = none.

    q [D, heads, n] dt; weights [D, heads] fp32 (already scaled); keys [rows, n]: flat view of the cache;
    key_rows [D, E] int64: the row of each entry, -1 = none. Score of an entry: sum_h weight_h * relu(q_h . key).
    """
    num_rows, num_heads, _ = q.shape
    num_entries = key_rows.shape[1]
    chosen = torch.empty((num_rows, min(topk, num_entries)), dtype=torch.int64, device=q.device)
    tile = max(1, _TILE_BYTES // max(1, 4 * num_entries * max(num_heads, q.shape[2])))
    for start in range(0, num_rows, tile):
        part = slice(start, start + tile)
        gathered, valid = _gather(keys, key_rows[part], q.dtype)
        products = torch.bmm(q[part], gathered.transpose(1, 2)).relu_().float()
        scores = torch.bmm(weights[part].unsqueeze(1), products).squeeze(1)
        chosen[part] = _top_entries(scores.masked_fill_(~valid, -torch.inf), chosen.shape[1])
    return chosen


def index_chunk(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, ratio: int, first_position: int, topk: int
) -> torch.Tensor:
    """The indexer's choice for consecutive queries of one sequence: [Q, min(topk, E)] int64, -1 = none.

    q [Q, heads, n] dt at positions first_position ...; keys [E, n] dt; query t chooses below (t + 1) // ratio.
    """
    num_queries, num_heads, _ = q.shape
    width = min(topk, keys.shape[0])
    chosen = torch.full((num_queries, width), -1, dtype=torch.int64, device=q.device)
    tile = max(1, _TILE_BYTES // max(1, 4 * num_heads * keys.shape[0]))
    for start in range(0, num_queries, tile):
        end = min(start + tile, num_queries)
        num_visible = (first_position + end) // ratio
        positions = torch.arange(first_position + start, first_position + end, device=q.device)
        visible = _entry_mask(positions, num_visible, ratio, None)
        products = (q[start:end].flatten(0, 1) @ keys[:num_visible].T).relu_().float()
        products = products.view(-1, num_heads, num_visible)
        scores = torch.bmm(weights[start:end].unsqueeze(1), products).squeeze(1)
        top = _top_entries(scores.masked_fill_(~visible, -torch.inf), min(width, num_visible))
        chosen[start:end, : top.shape[1]] = top
    return chosen


def _gather(flat: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(keys [D, K, n], valid [D, K]); rows of -1 come out as zeros, whatever bytes lie in the cache."""
    valid = rows >= 0
    gathered = flat.index_select(0, rows.clamp(min=0).flatten()).to(dtype).view(*rows.shape, flat.shape[1])
    return gathered.masked_fill_(~valid.unsqueeze(-1), 0), valid


def _softmax_with_sink(logits: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Softmax over [..., heads, K] fp32 logits and one more logit per head that has no value."""
    sink = sinks.unsqueeze(-1).expand(*logits.shape[:-1], 1)
    top = torch.maximum(logits.amax(dim=-1, keepdim=True), sink)
    powers = (logits - top).exp_()
    return powers.div_(powers.sum(dim=-1, keepdim=True) + (sink - top).exp())


def _band_mask(
    start: int, end: int, low: int, high: int, num_history: int, window: int, device: torch.device
) -> torch.Tensor:
    """[end - start, high - low] bool: which window keys low..high each query start..end sees."""
    distance = torch.arange(start + num_history, end + num_history, device=device).unsqueeze(1) - torch.arange(
        low, high, device=device
    )
    return (distance >= 0) & (distance < window)


def _band_rows(q: torch.Tensor, window_keys: torch.Tensor, window: int) -> torch.Tensor:
    """[Q, window] int64 row numbers of window_keys that each query sees, -1 = none."""
    own = torch.arange(window_keys.shape[0] - q.shape[0], window_keys.shape[0], device=q.device)
    return (own.unsqueeze(1) - torch.arange(window - 1, -1, -1, device=q.device)).clamp(min=-1)


def _entry_mask(positions: torch.Tensor, num_entries: int, ratio: int, selected: torch.Tensor | None) -> torch.Tensor:
    """[Q, num_entries] bool: entries closed by each query's position, and chosen by it if a choice is given."""
    if selected is None:
        return torch.arange(num_entries, device=positions.device) < ((positions + 1) // ratio).unsqueeze(1)
    mask = torch.zeros((positions.shape[0], num_entries + 1), dtype=torch.bool, device=positions.device)
    mask.scatter_(1, selected.where(selected >= 0, num_entries), True)
    return mask[:, :num_entries]


def _top_entries(scores: torch.Tensor, topk: int) -> torch.Tensor:
    """Numbers of the topk highest scores [D, E], -1 where fewer than topk are above -inf."""
    best, entries = torch.topk(scores, topk, dim=-1)
    return entries.where(best > -torch.inf, -1)
