"""Attention of drafted blocks: every row of a block sees the window before it and the whole block.

Plain torch on any device: a step has a handful of rows. Formulas: DeepSeek-V4.1 report, on DSpark.
"""

from __future__ import annotations

import torch

from headrace_engine.kernels.norm_rope import rotate


def block_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    starts: torch.Tensor,
    slots: torch.Tensor,
    ring: torch.Tensor,
    layer: int,
    window: int,
    sinks: torch.Tensor,
    scale: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> torch.Tensor:
    """[D * K, heads, n] dt: D blocks of K rows, softmax with one more logit per head that has no value.

    q [D * K, heads, n] and kv [D * K, n] dt, rotated; starts [D]: position of each block's first row; ring [slots,
    layers, rows >= window, n] has the rows of the `window` positions before it (position p in row p % rows) at slots
    [D]; sinks [heads] fp32. The output is turned back by its own position's angle, cos and sin [D * K, r] fp32.
    """
    num_blocks, (num_rows, heads, dim) = len(starts), q.shape
    size = num_rows // max(num_blocks, 1)
    history = starts.unsqueeze(1) - torch.arange(window, 0, -1, device=starts.device)  # [D, window]
    is_before = (history < 0).unsqueeze(2)
    old = ring[slots.unsqueeze(1), layer, history % ring.shape[2]].to(q.dtype).masked_fill(is_before, 0)
    keys = torch.cat([old, kv.view(num_blocks, size, dim)], dim=1).float()  # [D, window + K, n]
    logits = torch.einsum("dqhn,dkn->dqhk", q.view(num_blocks, size, heads, dim).float(), keys) * scale
    logits[..., :window].masked_fill_(is_before.view(num_blocks, 1, 1, window), -torch.inf)
    sink = sinks.view(1, 1, heads, 1).expand(*logits.shape[:3], 1)
    shares = torch.softmax(torch.cat([logits, sink], dim=-1), dim=-1)[..., :-1]
    out = torch.einsum("dqhk,dkn->dqhn", shares, keys).to(q.dtype)
    return rotate(out.reshape(q.shape), cos, sin, inverse=True)
