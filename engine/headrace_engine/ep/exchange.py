"""How a MoE layer's tokens reach the ranks that hold their experts, and come back.

Backends: `LocalExchange` (every expert is here), `AllToAllExchange` (dispatch and combine over the group).
Each token's results are summed in its source rank in the order of its top-k list, so that the sum does not
depend on where the experts live.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

# (rows [M, hidden], local expert of each row [M], weight of each row [M] fp32) -> weighted outputs [M, hidden].
# Rows may come in any order; M may be 0. A negative expert is no expert: its output row is zero.
RunExperts = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor"], "torch.Tensor"]


class Exchange(Protocol):
    """One MoE layer's dispatch, local experts, combine. A collective: every rank of the group must call it."""

    def run(
        self,
        hidden: torch.Tensor,  # [T, hidden]
        expert_ids: torch.Tensor,  # [T, k] int64, logical experts
        expert_weights: torch.Tensor,  # [T, k] fp32
        run_experts: RunExperts,
    ) -> torch.Tensor:
        """[T, hidden]: for each token the sum over its k experts of weight * expert(token)."""
        ...
