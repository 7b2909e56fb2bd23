"""The compressor of CSA and HCA layers: closes groups of tokens into cache entries, keeps the open rows in a carry."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace_engine.models.deepseek_v4 import ops
from headrace_engine.models.deepseek_v4.plan import CompressionPlan


@dataclass
class Compressor:
    """One compressor's own weights; its projections run fused with the layer's others.

    Two series (CSA): the width of a row is 2 * entry_dim, series `a` first; an entry pools the a-series of the group
    before it and the b-series of its own group. One series (HCA): an entry pools its own group.
    """

    position_bias: torch.Tensor  # [ratio, series * entry_dim] fp32, added to the gates by position in the group
    norm: torch.Tensor  # [entry_dim] fp32
    norm_eps: float
    two_series: bool

    def run(
        self,
        values: torch.Tensor,
        gates: torch.Tensor,
        positions: torch.Tensor,
        plan: CompressionPlan,
        carry: torch.Tensor,
        entries: torch.Tensor,
    ) -> None:
        """Writes the entries that this step closes and the carry rows that later steps need.

        values, gates [T, series * entry_dim] dt; carry [rows, 2 * series * entry_dim] fp32 and entries
        [rows, entry_dim]: the layer's flat views.
        """
        ratio = self.position_bias.shape[0]
        rows = torch.cat([values.float(), gates.float() + self.position_bias[positions % ratio]], dim=1)
        if plan.num_closed:
            pooled = self._pool(torch.cat([rows, carry.index_select(0, plan.history_rows)]), plan)
            normed = ops.rms_norm(pooled, self.norm, self.norm_eps)
            entries.index_copy_(0, plan.entry_rows, ops.rope(normed, *plan.rope).to(entries.dtype))
        carry.index_copy_(0, plan.carry_write.target, rows.index_select(0, plan.carry_write.source))

    def _pool(self, table: torch.Tensor, plan: CompressionPlan) -> torch.Tensor:
        """Entries [G, entry_dim] fp32, before norm and rotation, from the table of rows [T + C, values | gates]."""
        series = table.view(table.shape[0], 4 if self.two_series else 2, -1)  # [a, b, gate a, gate b] or [value, gate]
        if self.two_series:
            ratio = self.position_bias.shape[0]
            previous, own = plan.slots[:, :ratio], plan.slots[:, ratio:]
            values = torch.cat([series[previous, 0], series[own, 1]], dim=1)
            gates = torch.cat([series[previous, 2], series[own, 3]], dim=1)
        else:
            values, gates = series[plan.slots, 0], series[plan.slots, 1]
        if plan.absent is not None:
            gates = gates.masked_fill(plan.absent, -torch.inf)
        return ops.pool(values, gates)
