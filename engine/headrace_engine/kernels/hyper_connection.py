"""Manifold-constrained hyper-connections (DeepSeek-V4 report, section 2.2): N residual streams around each sublayer."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headrace_engine.kernels.native import is_wide, library_for
from headrace_engine.kernels.norm_rope import rms_norm_reference

_MAX_STREAMS = 8  # as in csrc/hyper_connection.cpp


def hyper_connection_mix(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_weight: torch.Tensor,
    *,
    rms_eps: float,
    hc_eps: float,
    iterations: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a site's sublayer reads, and how its output and the streams are mixed afterwards.

    streams [T, N, d] dt; fn [(2 + N) * N, N * d], base [(2 + N) * N], scale [3], norm_weight [d] fp32, in the order
    pre | post | comb. Returns normed [T, d] dt (the streams' weighted sum, RMS-normalised), post [T, N] fp32 and comb
    [T, N, N] fp32 (row = source stream, column = destination; Sinkhorn-Knopp makes it nearly doubly stochastic).
    """
    if library_for(streams) is None:
        return hyper_connection_mix_reference(
            streams, fn, base, scale, norm_weight, rms_eps=rms_eps, hc_eps=hc_eps, iterations=iterations
        )
    settings = (iterations, rms_eps, hc_eps)
    return _native_mix(streams, fn, base, scale, norm_weight, settings, None, None)


def single_pass_mix(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_weight: torch.Tensor,
    pre: torch.Tensor,
    *,
    rms_eps: float,
    hc_eps: float,
    iterations: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """hyper_connection_mix whose weighted sum is by `pre` [T, N] fp32 of the site before (DeepSeek-V4.1, section 2.4).

    Returns normed, post, comb, and this site's own pre [T, N] fp32 for the next.
    """
    if library_for(streams) is None:
        return single_pass_mix_reference(
            streams, fn, base, scale, norm_weight, pre, rms_eps=rms_eps, hc_eps=hc_eps, iterations=iterations
        )
    if not is_wide(pre, streams.shape[0] * streams.shape[1]):
        raise ValueError("single_pass_mix: pre must be contiguous fp32 [T, N]")
    own_pre = torch.empty_like(pre)
    settings = (iterations, rms_eps, hc_eps)
    return *_native_mix(streams, fn, base, scale, norm_weight, settings, pre, own_pre), own_pre


def _native_mix(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_weight: torch.Tensor,
    settings: tuple[int, float, float],  # iterations, rms_eps, hc_eps
    given_pre: torch.Tensor | None,
    own_pre: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(normed, post, comb); own_pre is filled in."""
    library = library_for(streams)
    assert library is not None
    tokens, num_streams, dim = streams.shape
    _check(streams, fn, base, scale, norm_weight, (2 + num_streams) * num_streams, 3)
    normed = torch.empty((tokens, dim), dtype=streams.dtype)
    post = torch.empty((tokens, num_streams))
    comb = torch.empty((tokens, num_streams, num_streams))
    library.headrace_hc_mix(
        streams.dtype is torch.bfloat16, streams.data_ptr(), fn.data_ptr(), base.data_ptr(), scale.data_ptr(),
        norm_weight.data_ptr(), tokens, num_streams, dim, *settings,
        None if given_pre is None else given_pre.data_ptr(), normed.data_ptr(),
        None if own_pre is None else own_pre.data_ptr(), post.data_ptr(), comb.data_ptr(),
    )  # fmt: skip
    return normed, post, comb


def hyper_connection_update(
    streams: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """In place: stream j <- post_j * y + sum over i of comb[i, j] * stream i; y [T, d] dt, the rest as from mix."""
    library = library_for(streams)
    if library is None:
        return streams.copy_(hyper_connection_update_reference(streams, y, post, comb))
    tokens, num_streams, dim = streams.shape
    if not (streams.is_contiguous() and num_streams <= _MAX_STREAMS):
        raise ValueError("hyper_connection_update: streams [T, N <= 8, d]")
    if not (y.shape == (tokens, dim) and y.dtype is streams.dtype and y.is_contiguous()):
        raise ValueError(f"hyper_connection_update: y must be contiguous [{tokens}, {dim}] in the streams' dtype")
    if not (
        post.shape == (tokens, num_streams)
        and comb.shape == (tokens, num_streams, num_streams)
        and post.is_contiguous()
        and comb.is_contiguous()
    ):
        raise ValueError("hyper_connection_update: post and comb must be as hyper_connection_mix made them")
    library.headrace_hc_update(
        streams.dtype is torch.bfloat16, streams.data_ptr(), y.data_ptr(), post.data_ptr(), comb.data_ptr(),
        tokens, num_streams, dim,
    )  # fmt: skip
    return streams


def hyper_connection_head(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_weight: torch.Tensor,
    *,
    rms_eps: float,
    hc_eps: float,
) -> torch.Tensor:
    """The model's last collapse and norm: [T, d] dt. fn [N, N * d], base [N], scale [1], norm_weight [d] fp32."""
    library = library_for(streams)
    if library is None:
        return hyper_connection_head_reference(streams, fn, base, scale, norm_weight, rms_eps=rms_eps, hc_eps=hc_eps)
    tokens, num_streams, dim = streams.shape
    _check(streams, fn, base, scale, norm_weight, num_streams, 1)
    normed = torch.empty((tokens, dim), dtype=streams.dtype)
    library.headrace_hc_head(
        streams.dtype is torch.bfloat16, streams.data_ptr(), fn.data_ptr(), base.data_ptr(), scale.data_ptr(),
        norm_weight.data_ptr(), tokens, num_streams, dim, rms_eps, hc_eps, normed.data_ptr(),
    )  # fmt: skip
    return normed


def hyper_connection_head_weights(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    rms_eps: float,
    hc_eps: float,
) -> torch.Tensor:
    """What hyper_connection_head weighs the streams by: [T, N] fp32."""
    return torch.sigmoid(_normalised_linear(streams, fn, rms_eps) * scale + base) + hc_eps


def hyper_connection_mix_reference(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_weight: torch.Tensor,
    *,
    rms_eps: float,
    hc_eps: float,
    iterations: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    pre, post, comb = _coefficients(streams, fn, base, scale, rms_eps, hc_eps, iterations)
    return rms_norm_reference(weighted_sum(pre, streams), norm_weight, rms_eps), post, comb


def single_pass_mix_reference(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_weight: torch.Tensor,
    pre: torch.Tensor,
    *,
    rms_eps: float,
    hc_eps: float,
    iterations: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    own_pre, post, comb = _coefficients(streams, fn, base, scale, rms_eps, hc_eps, iterations)
    return rms_norm_reference(weighted_sum(pre, streams), norm_weight, rms_eps), post, comb, own_pre


def weighted_norm(streams: torch.Tensor, pre: torch.Tensor, norm_weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of the streams' sum weighted by pre: [T, d] dt of streams [T, N, d] dt, pre [T, N] fp32."""
    return rms_norm_reference(weighted_sum(pre, streams), norm_weight, eps)


def _coefficients(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    rms_eps: float,
    hc_eps: float,
    iterations: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(pre [T, N], post [T, N], comb [T, N, N]) fp32."""
    num_streams = streams.shape[1]
    parts = [num_streams, num_streams, num_streams**2]
    pre, post, comb = torch.split(_normalised_linear(streams, fn, rms_eps), parts, dim=-1)
    pre_base, post_base, comb_base = torch.split(base, parts)
    pre = torch.sigmoid(pre * scale[0] + pre_base) + hc_eps
    post = 2 * torch.sigmoid(post * scale[1] + post_base)
    comb = (comb * scale[2] + comb_base).view(-1, num_streams, num_streams)
    comb = torch.softmax(comb, dim=-1) + hc_eps
    comb = comb / (comb.sum(dim=-2, keepdim=True) + hc_eps)
    for _ in range(iterations - 1):  # rows, then columns: it ends on columns
        comb = comb / (comb.sum(dim=-1, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(dim=-2, keepdim=True) + hc_eps)
    return pre, post, comb


def hyper_connection_update_reference(
    streams: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    mixed = torch.bmm(comb.transpose(1, 2), streams.float())
    return torch.addcmul(mixed, post.unsqueeze(-1), y.float().unsqueeze(1)).to(streams.dtype)


def hyper_connection_head_reference(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_weight: torch.Tensor,
    *,
    rms_eps: float,
    hc_eps: float,
) -> torch.Tensor:
    pre = hyper_connection_head_weights(streams, fn, base, scale, rms_eps=rms_eps, hc_eps=hc_eps)
    return rms_norm_reference(weighted_sum(pre, streams), norm_weight, rms_eps)


def _normalised_linear(streams: torch.Tensor, fn: torch.Tensor, eps: float) -> torch.Tensor:
    """fn applied to the RMS-normalised concatenation of the streams: [T, out] fp32."""
    flat = streams.float().flatten(1)
    return F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)


def weighted_sum(weights: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    """[T, d] dt of streams [T, N, d] dt and weights [T, N] fp32."""
    return torch.bmm(weights.unsqueeze(1), streams.float()).squeeze(1).to(streams.dtype)


def _check(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_weight: torch.Tensor,
    outputs: int,
    scales: int,
) -> None:
    _, num_streams, dim = streams.shape
    if not (streams.is_contiguous() and num_streams <= _MAX_STREAMS):
        raise ValueError("hyper-connection: streams [T, N <= 8, d]")
    if not (
        is_wide(fn, outputs * num_streams * dim)
        and is_wide(base, outputs)
        and is_wide(scale, scales)
        and is_wide(norm_weight, dim)
    ):
        raise ValueError(
            f"hyper-connection: fn [{outputs}, {num_streams * dim}], base [{outputs}], scale [{scales}] and "
            f"norm_weight [{dim}] must be contiguous fp32"
        )
