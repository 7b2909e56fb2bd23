"""Compressed entries of DeepSeek-V4.1: groups of tokens pooled without overlap (report, section 2.3)."""

from __future__ import annotations

import torch

from headrace_engine.models.closing import Closing
from headrace_engine.models.protocol import ForwardBatch


def pool(rows: torch.Tensor, closing: Closing, batch: ForwardBatch, carry: torch.Tensor, layer: int) -> torch.Tensor:
    """Softmax(gates)-weighted values of each closing group, per channel: [C, n] fp32.

    rows [T, 2 * n] dt: values, then gates, of this step's tokens; carry [slots, layers, R, 2 * n] fp32 has those of
    earlier steps (position p in row p % R).
    """
    slots, starts = batch.state_slots[closing.sequences], batch.query_starts[closing.sequences]
    back = torch.arange(closing.ratio - 1, -1, -1, device=rows.device)
    sources = closing.tokens.unsqueeze(1) - back  # [C, ratio]
    positions = closing.first_positions.unsqueeze(1) + (closing.ratio - 1 - back)
    is_here = (sources >= starts.unsqueeze(1)).unsqueeze(2)
    earlier = carry[slots.unsqueeze(1), layer, positions % carry.shape[2]]
    values, gates = torch.where(is_here, rows[sources.clamp(min=0)].float(), earlier).chunk(2, dim=2)
    return (torch.softmax(gates, dim=1) * values).sum(dim=1)


def write_carry(
    rows: torch.Tensor, batch: ForwardBatch, sequence: torch.Tensor, carry: torch.Tensor, layer: int
) -> None:
    """Keeps each sequence's last rows of this step, as many as fit. Only after `pool`, which reads what this drops."""
    num_rows = carry.shape[2]
    kept = torch.nonzero(batch.positions >= batch.context_lens[sequence] - num_rows).squeeze(1)
    slots = batch.state_slots[sequence[kept]]
    carry[slots, layer, batch.positions[kept] % num_rows] = rows[kept].float()
