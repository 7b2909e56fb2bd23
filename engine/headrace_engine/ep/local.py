"""The exchange of a rank that holds every expert, and the sum that all exchanges end with."""

from __future__ import annotations

import torch

from headrace_engine import kernels
from headrace_engine.ep.exchange import RunExperts


class LocalExchange:
    """Every expert is here: no communication."""

    def run(
        self, hidden: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor, run_experts: RunExperts
    ) -> torch.Tensor:
        """See exchange.Exchange."""
        num_tokens, topk = expert_ids.shape
        rows = hidden.unsqueeze(1).expand(-1, topk, -1).reshape(num_tokens * topk, hidden.shape[1]).contiguous()
        outputs = run_experts(rows, expert_ids.flatten(), expert_weights.flatten())
        return sum_in_order(outputs.view(num_tokens, topk, hidden.shape[1]))


def sum_in_order(outputs: torch.Tensor) -> torch.Tensor:
    """outputs [T, k, hidden] -> [T, hidden]: summed in fp32 in the order of each token's top-k list.

    A fixed order makes the sum independent of which rank computed which term.
    """
    return kernels.sum_choices(outputs)
