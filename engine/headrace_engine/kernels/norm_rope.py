"""RMSNorm, alone or followed by the rotary embedding (DeepSeek-V4 report, section 2.3)."""

from __future__ import annotations

import torch

from headrace_engine.kernels.native import is_wide, library_for


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over rows of x [M, n] dt (rows may be strided); weight [n] fp32. [M, n] dt."""
    library = library_for(x)
    if library is None:
        return rms_norm_reference(x, weight, eps)
    rows, dim = x.shape
    _check_rows(x, weight)
    out = torch.empty((rows, dim), dtype=x.dtype)
    library.headrace_norm_rope(
        x.dtype is torch.bfloat16, x.data_ptr(), weight.data_ptr(), None, None,
        rows, 1, dim, 0, x.stride(0), eps, 1, out.data_ptr(),
    )  # fmt: skip
    return out


def rms_norm_rope(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    """rms_norm, then each row's last 2 * r dims turned by its angle: cos, sin [M, r] fp32.

    Adjacent dims (2k, 2k + 1) are one complex number, of angle k.
    """
    library = library_for(x)
    if library is None:
        return rotate(rms_norm_reference(x, weight, eps), cos, sin)
    rows, dim = x.shape
    _check_rows(x, weight)
    _check_angles(cos, sin, rows, dim)
    out = torch.empty((rows, dim), dtype=x.dtype)
    library.headrace_norm_rope(
        x.dtype is torch.bfloat16, x.data_ptr(), weight.data_ptr(), cos.data_ptr(), sin.data_ptr(),
        rows, 1, dim, cos.shape[1], x.stride(0), eps, 1, out.data_ptr(),
    )  # fmt: skip
    return out


def head_norm_rope(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float | None) -> torch.Tensor:
    """In place: every head of q [T, heads, n] dt divided by its RMS (not if eps is None), then turned as above; q."""
    library = library_for(q)
    if library is None:
        return head_norm_rope_reference(q, cos, sin, eps)
    tokens, heads, dim = q.shape
    if not (q.is_contiguous()):
        raise ValueError("head_norm_rope: q must be contiguous")
    _check_angles(cos, sin, tokens, dim)
    library.headrace_norm_rope(
        q.dtype is torch.bfloat16, q.data_ptr(), None, cos.data_ptr(), sin.data_ptr(),
        tokens * heads, heads, dim, cos.shape[1], dim, eps or 0.0, eps is not None, q.data_ptr(),
    )  # fmt: skip
    return q


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide if weight is None else wide * weight).to(x.dtype)


def head_norm_rope_reference(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float | None) -> torch.Tensor:
    if eps is not None:
        q.copy_(rms_norm_reference(q, None, eps))
    return rotate(q, cos, sin)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """In place: the last 2 * r dims of x [T, n] or [T, heads, n] turned by cos, sin [T, r] fp32, or back by them; x."""
    if x.ndim == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    pairs = x[..., x.shape[-1] - 2 * cos.shape[-1] :].view(*x.shape[:-1], cos.shape[-1], 2)
    real, imaginary = pairs[..., 0].float(), pairs[..., 1].float()
    sin = -sin if inverse else sin
    turned = real * cos - imaginary * sin  # before the writes: in fp32 the two parts are views of x
    pairs[..., 1] = real * sin + imaginary * cos
    pairs[..., 0] = turned
    return x


def _check_rows(x: torch.Tensor, weight: torch.Tensor) -> None:
    if x.stride(1) != 1:
        raise ValueError("rms_norm: each row of x must be contiguous")
    if not is_wide(weight, x.shape[1]):
        raise ValueError(f"rms_norm: weight must be {x.shape[1]} contiguous fp32 numbers")


def _check_angles(cos: torch.Tensor, sin: torch.Tensor, tokens: int, dim: int) -> None:
    half = cos.shape[1]
    if not (is_wide(cos, tokens * half) and is_wide(sin, tokens * half) and 2 * half <= dim):
        raise ValueError(f"rope: cos and sin must be contiguous fp32 [{tokens}, at most {dim // 2}]")
