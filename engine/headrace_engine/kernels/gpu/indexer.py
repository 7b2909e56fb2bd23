"""Scores of the lightning indexer, with the best score of each run of entries (contract: `kernels.indexer`)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from headrace_engine.kernels.gpu.launch import product_type, token_sequences
from headrace_engine.kernels.gpu.pages import gather_entries_reference
from headrace_engine.kernels.gpu.records import Pages, load_entries
from headrace_engine.kernels.indexer import entry_scores
from headrace_engine.models.protocol import ForwardBatch

_ENTRIES = 64  # of a program
_MIN_HEADS = 16  # the fewest columns of a matrix product


def index_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    batch: ForwardBatch,
    pages: Pages,
    ratio: int,
    run: int,
    runs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(scores [T, G] fp32, best [T, ceil(G / run)] fp32) of each query against the keys that it sees; -inf elsewhere.

    score(t, g) = sum over heads of weights[t, h] * relu(q[t, h] . key[g]). Column g is entry g; or, with runs [T, B]
    int32 (numbers of runs of `run` entries, negative for none), entry runs[t, g // run] * run + g % run. best: the
    largest score of each run, infinite for the run of the newest visible entry. q [T, heads, n] dt; weights [T, heads]
    fp32; run a power of two, at most 64.
    """
    tokens, heads, dim = q.shape
    if not (q.is_contiguous() and weights.shape == (tokens, heads) and weights.is_contiguous()):
        raise ValueError(f"index_scores: q and weights [{tokens}, {heads}] must be contiguous")
    if run & (run - 1) or not 0 < run <= _ENTRIES or pages.layout.dim != dim:
        raise ValueError(f"index_scores: runs of {run} entries are no power of two up to {_ENTRIES}, or keys not {dim}")
    if not (runs is None or (runs.dtype is torch.int32 and runs.is_contiguous())):
        raise ValueError(f"index_scores: runs must be contiguous int32 [{tokens}, B]")
    num_entries = batch.max_context_len // ratio if runs is None else runs.shape[1] * run
    num_runs = triton.cdiv(num_entries, run)
    scores = torch.empty((tokens, num_entries), dtype=torch.float32, device=q.device)
    best = torch.empty((tokens, num_runs), dtype=torch.float32, device=q.device)
    _score[(tokens, triton.cdiv(num_entries, _ENTRIES))](
        q, weights, pages.base, scores if runs is None else runs, scores, best, token_sequences(batch),
        batch.query_starts, batch.context_lens, batch.block_tables, pages.block_stride, batch.block_tables.shape[1],
        heads, num_entries, num_runs,
        DIM=dim, HEADS=max(_MIN_HEADS, triton.next_power_of_2(heads)), ENTRIES=_ENTRIES, RUN=run, RATIO=ratio,
        LAYOUT=pages.layout, HAS_RUNS=runs is not None, PRODUCT=product_type(q.dtype),
    )  # fmt: skip
    return scores, best


def index_scores_reference(
    q: torch.Tensor,
    weights: torch.Tensor,
    batch: ForwardBatch,
    pages: Pages,
    ratio: int,
    run: int,
    runs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_entries = batch.max_context_len // ratio if runs is None else runs.shape[1] * run
    offsets = torch.arange(num_entries, device=q.device)
    scores = torch.full((q.shape[0], num_entries), -torch.inf, device=q.device)
    best = torch.full((q.shape[0], -(-num_entries // run)), -torch.inf, device=q.device)
    for t, s in enumerate(token_sequences(batch).tolist()):
        visible = (int(batch.positions[t]) + 1) // ratio
        entries = offsets if runs is None else (runs[t].long().unsqueeze(1) * run + offsets[:run]).flatten()
        entries = entries.where(entries < visible, -1)
        sequences = torch.full_like(entries, s)
        keys = gather_entries_reference(pages, batch.block_tables, sequences, entries, torch.float32)
        own = entry_scores(q[t : t + 1], weights[t : t + 1], keys)[0].masked_fill(entries < 0, -torch.inf)
        scores[t] = own
        padded = F.pad(own, (0, -num_entries % run), value=-torch.inf)
        best[t] = padded.view(-1, run).amax(dim=1)
        if visible:
            is_newest = F.pad(entries == visible - 1, (0, -num_entries % run)).view(-1, run).any(dim=1)
            best[t, is_newest] = torch.inf
    return scores, best


@triton.jit
def _score(
    q_ptr, weights_ptr, keys_ptr, runs_ptr, scores_ptr, best_ptr, sequences_ptr, starts_ptr, contexts_ptr, tables_ptr,
    block_stride, max_blocks, num_heads, num_entries, num_runs,
    DIM: tl.constexpr, HEADS: tl.constexpr, ENTRIES: tl.constexpr, RUN: tl.constexpr, RATIO: tl.constexpr,
    LAYOUT: tl.constexpr, HAS_RUNS: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    token, columns = tl.program_id(0), tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    heads, dims = tl.arange(0, HEADS), tl.arange(0, DIM)
    sequence = tl.load(sequences_ptr + token)
    position = tl.load(contexts_ptr + sequence) - tl.load(starts_ptr + sequence + 1) + token
    visible = (position + 1) // RATIO
    if HAS_RUNS:
        numbers = tl.load(runs_ptr + token * num_runs + columns // RUN, mask=columns < num_entries, other=-1)
        entry = tl.where(numbers >= 0, numbers * RUN + columns % RUN, visible)
    else:
        entry = columns
    is_seen = (entry < visible) & (columns < num_entries)
    keys = load_entries(keys_ptr, block_stride, tables_ptr + sequence * max_blocks, entry, is_seen, LAYOUT)
    own = (token.to(tl.int64) * num_heads + heads)[:, None] * DIM + dims[None, :]
    q = tl.load(q_ptr + own, mask=(heads < num_heads)[:, None], other=0.0).to(PRODUCT)
    weights = tl.load(weights_ptr + token * num_heads + heads, mask=heads < num_heads, other=0.0)
    products = tl.dot(keys.to(PRODUCT), tl.trans(q), input_precision="ieee")
    scores = tl.sum(tl.maximum(products, 0.0) * weights[None, :], 1)
    scores = tl.where(is_seen, scores, -float("inf"))
    tl.store(scores_ptr + token.to(tl.int64) * num_entries + columns, scores, mask=columns < num_entries)
    is_newest = is_seen & (entry == visible - 1)
    best = tl.max(tl.reshape(tl.where(is_newest, float("inf"), scores), (ENTRIES // RUN, RUN)), 1)
    runs = tl.program_id(1) * (ENTRIES // RUN) + tl.arange(0, ENTRIES // RUN)
    tl.store(best_ptr + token.to(tl.int64) * num_runs + runs, best, mask=runs < num_runs)
