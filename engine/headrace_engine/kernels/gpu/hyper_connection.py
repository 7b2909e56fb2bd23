"""Mixing of the residual streams around a sublayer (contracts and references: `kernels.hyper_connection`).

A program has one token. It reads the streams once for each part of the coefficients and twice for their sum, from cache
after the first time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_COLUMNS = 512  # of a stream, read at once


def single_pass_mix(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_weight: torch.Tensor,
    pre: torch.Tensor | None,
    *,
    rms_eps: float,
    hc_eps: float,
    iterations: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As kernels.single_pass_mix; with pre None the sum is weighted by the site's own pre, as hyper_connection_mix.

    The number of streams is a power of two.
    """
    tokens, num_streams, dim = streams.shape
    if num_streams & (num_streams - 1) or not streams.is_contiguous():
        raise ValueError(f"single_pass_mix: streams {list(streams.shape)} must be contiguous, a power of two of them")
    for name, x, numel in (
        ("fn", fn, (2 + num_streams) * num_streams**2 * dim),
        ("base", base, (2 + num_streams) * num_streams),
        ("scale", scale, 3),
        ("norm_weight", norm_weight, dim),
        *(() if pre is None else (("pre", pre, tokens * num_streams),)),
    ):
        if not (x.dtype is torch.float32 and x.numel() == numel and x.is_contiguous()):
            raise ValueError(f"single_pass_mix: {name} must be contiguous fp32 of {numel} elements")
    normed = streams.new_empty((tokens, dim))
    own_pre, post = (torch.empty((tokens, num_streams), device=streams.device) for _ in range(2))
    comb = torch.empty((tokens, num_streams, num_streams), device=streams.device)
    _mix[(tokens,)](
        streams, fn, base, scale, norm_weight, own_pre if pre is None else pre, normed, own_pre, post, comb,
        dim, rms_eps, hc_eps, iterations,
        STREAMS=num_streams, COLUMNS=min(_COLUMNS, triton.next_power_of_2(dim)), HAS_PRE=pre is not None,
    )  # fmt: skip
    return normed, post, comb, own_pre


def hyper_connection_update(
    streams: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """In place, as kernels.hyper_connection_update: stream j <- post_j * y + sum over i of comb[i, j] * stream i."""
    tokens, num_streams, dim = streams.shape
    if not (streams.is_contiguous() and y.is_contiguous() and y.shape == (tokens, dim)):
        raise ValueError(f"hyper_connection_update: streams and y [{tokens}, {dim}] must be contiguous")
    columns = min(_COLUMNS, triton.next_power_of_2(dim))
    _update[(tokens, triton.cdiv(dim, columns))](streams, y, post, comb, dim, STREAMS=num_streams, COLUMNS=columns)
    return streams


@triton.jit
def _project(streams, fn, dim, row, STREAMS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """(fn's rows row .. row + ROWS applied to the concatenated streams [ROWS], sum of the streams' squares)."""
    columns, rows = tl.arange(0, COLUMNS), row + tl.arange(0, ROWS)
    sums = tl.zeros((ROWS,), tl.float32)
    squares = tl.zeros((COLUMNS,), tl.float32)
    for stream in range(STREAMS):
        for start in range(0, dim, COLUMNS):
            column = start + columns
            x = tl.load(streams + stream * dim + column, mask=column < dim, other=0.0).to(tl.float32)
            at = rows[:, None] * (STREAMS * dim) + stream * dim + column[None, :]
            sums += tl.sum(tl.load(fn + at, mask=(column < dim)[None, :], other=0.0) * x[None, :], 1)
            squares += x * x
    return sums, tl.sum(squares, 0)


@triton.jit
def _mix(
    streams_ptr, fn_ptr, base_ptr, scale_ptr, norm_ptr, pre_ptr, normed_ptr, own_pre_ptr, post_ptr, comb_ptr,
    dim, rms_eps, hc_eps, iterations,
    STREAMS: tl.constexpr, COLUMNS: tl.constexpr, HAS_PRE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    streams, each = streams_ptr + token * STREAMS * dim, tl.arange(0, STREAMS)
    comb_at = each[:, None] * STREAMS + each[None, :]
    pre, squares = _project(streams, fn_ptr, dim, 0, STREAMS, COLUMNS, STREAMS)
    post, _ = _project(streams, fn_ptr, dim, STREAMS, STREAMS, COLUMNS, STREAMS)
    comb, _ = _project(streams, fn_ptr, dim, 2 * STREAMS, STREAMS, COLUMNS, STREAMS * STREAMS)
    inverse_rms = tl.rsqrt(squares / (STREAMS * dim) + rms_eps)
    pre = tl.sigmoid(pre * inverse_rms * tl.load(scale_ptr) + tl.load(base_ptr + each)) + hc_eps
    post = 2.0 * tl.sigmoid(post * inverse_rms * tl.load(scale_ptr + 1) + tl.load(base_ptr + STREAMS + each))
    comb = tl.reshape(comb, (STREAMS, STREAMS)) * inverse_rms * tl.load(scale_ptr + 2)
    comb = _balance(comb + tl.load(base_ptr + 2 * STREAMS + comb_at), hc_eps, iterations)
    tl.store(own_pre_ptr + token * STREAMS + each, pre)
    tl.store(post_ptr + token * STREAMS + each, post)
    tl.store(comb_ptr + token * STREAMS * STREAMS + comb_at, comb)
    weights = tl.load(pre_ptr + token * STREAMS + each) if HAS_PRE else pre
    columns = tl.arange(0, COLUMNS)
    squares = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, dim, COLUMNS):
        mixed = _weighted_sum(streams, weights, start + columns, dim, normed_ptr)
        squares += mixed * mixed
    inverse_rms = tl.rsqrt(tl.sum(squares, 0) / dim + rms_eps)
    for start in range(0, dim, COLUMNS):
        column = start + columns
        mixed = _weighted_sum(streams, weights, column, dim, normed_ptr)
        gain = tl.load(norm_ptr + column, mask=column < dim, other=0.0)
        tl.store(normed_ptr + token * dim + column, mixed * inverse_rms * gain, mask=column < dim)


@triton.jit
def _weighted_sum(streams, weights, column, dim, like):
    """[COLUMNS] fp32, rounded to the type that `like` points to, as a sum that stands alone would be."""
    at = tl.arange(0, weights.shape[0])[:, None] * dim + column[None, :]
    x = tl.load(streams + at, mask=(column < dim)[None, :], other=0.0).to(tl.float32)
    return tl.sum(x * weights[:, None], 0).to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _balance(logits, eps, iterations):
    """Softmax of each row, then Sinkhorn-Knopp, which ends on columns."""
    comb = tl.exp(logits - tl.max(logits, 1)[:, None])
    comb = comb / tl.sum(comb, 1)[:, None] + eps
    comb = comb / (tl.sum(comb, 0)[None, :] + eps)
    for _ in range(iterations - 1):
        comb = comb / (tl.sum(comb, 1)[:, None] + eps)
        comb = comb / (tl.sum(comb, 0)[None, :] + eps)
    return comb


@triton.jit
def _update(streams_ptr, y_ptr, post_ptr, comb_ptr, dim, STREAMS: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    each, column = tl.arange(0, STREAMS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    wanted = (column < dim)[None, :]
    at = token * STREAMS * dim + each[:, None] * dim + column[None, :]
    y = tl.load(y_ptr + token * dim + column, mask=column < dim, other=0.0).to(tl.float32)
    mixed = tl.load(post_ptr + token * STREAMS + each)[:, None] * y[None, :]
    for stream in range(STREAMS):
        x = tl.load(streams_ptr + (token * STREAMS + stream) * dim + column, mask=column < dim, other=0.0)
        shares = tl.load(comb_ptr + (token * STREAMS + stream) * STREAMS + each)
        mixed += shares[:, None] * x.to(tl.float32)[None, :]
    tl.debug_barrier()  # every thread has read the streams before any writes them
    tl.store(streams_ptr + at, mixed, mask=wanted)
