"""The mixture of experts: hash or score routing, routed experts behind the exchange, one shared expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace_engine import kernels
from headrace_engine.models.config_values import MoEConfig
from headrace_engine.models.rounding import NO_ROUNDING, Rounding

if TYPE_CHECKING:
    from headrace_engine.ep.exchange import Exchange
    from headrace_engine.models.builder import Builder


@dataclass
class MoE:
    """One layer's experts of this rank, and what every rank has. Stacks are gate projection first."""

    experts_per_token: int
    routed_scaling: float
    swiglu_limit: float
    gate: torch.Tensor  # [E, hidden] fp32
    bias: torch.Tensor | None  # [E] fp32: moves the choice, not the weights
    experts_of_token: torch.Tensor | None  # [vocab, k] int64, hash layers only
    w13: kernels.Weight | kernels.Fp4Weight  # [E of this rank, 2 * expert_dim, hidden]
    w2: kernels.Weight | kernels.Fp4Weight  # [E of this rank, hidden, expert_dim]
    shared_w13: kernels.Weight  # [2 * expert_dim, hidden]
    shared_w2: kernels.Weight  # [hidden, expert_dim]
    rounding: Rounding

    def run(self, x: torch.Tensor, token_ids: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        """x [T, hidden] dt, normed -> [T, hidden] dt. A collective when the exchange is one: T may be 0."""
        forced = None if self.experts_of_token is None else self.experts_of_token[token_ids]
        ids, weights = kernels.route(x, self.gate, self.bias, forced, self.experts_per_token, self.routed_scaling)
        x = self.rounding.of_input(x)
        routed = exchange.run(x, ids, weights, self._run_experts)
        shared = kernels.dense_mlp(x, self.shared_w13, self.shared_w2, self.swiglu_limit, self.rounding.input_block)
        return routed + shared

    def _run_experts(self, rows: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        limit, block = self.swiglu_limit, self.rounding.input_block
        return kernels.expert_mlp(rows, expert_ids, weights, self.w13, self.w2, limit, block)


def load_moe(
    builder: Builder,
    config: MoEConfig,
    prefix: str,
    experts_of_token: torch.Tensor | None = None,
    rounding: Rounding = NO_ROUNDING,
) -> MoE:
    """The experts under a published prefix; experts_of_token: of a hash layer, which has no bias."""
    shared_w13, shared_w2 = builder.shared_expert(prefix)
    w13, w2 = builder.expert_stacks(prefix, [("w1", "w3"), ("w2",)])
    return MoE(
        experts_per_token=config.experts_per_token,
        routed_scaling=config.routed_scaling,
        swiglu_limit=config.swiglu_limit,
        gate=builder.wide(f"{prefix}gate.weight"),
        bias=builder.wide(f"{prefix}gate.bias") if experts_of_token is None else None,
        experts_of_token=experts_of_token,
        w13=w13,
        w2=w2,
        shared_w13=shared_w13,
        shared_w2=shared_w2,
        rounding=rounding,
    )
