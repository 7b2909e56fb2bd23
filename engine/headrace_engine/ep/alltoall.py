"""Expert parallelism over torch.distributed: rows go to the ranks that own their experts, results come back.

Three collectives a layer: row counts, rows with their expert and weight in one payload, results.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from headrace_engine.ep.exchange import RunExperts
from headrace_engine.ep.local import sum_in_order


class AllToAllExchange:
    """Rank r of n owns experts [r * E / n, (r + 1) * E / n). A collective; a rank may have no rows to send or to run.

    The process group's timeout bounds every wait: a lost peer raises in the ranks that are left.
    """

    def __init__(self, group: dist.ProcessGroup, num_experts: int) -> None:
        """Raises ValueError if the experts do not divide over the group."""
        self._group = group
        self._num_ranks = group.size()
        if num_experts % self._num_ranks:
            raise ValueError(f"{num_experts} experts do not split over {self._num_ranks} ranks")
        self._experts_per_rank = num_experts // self._num_ranks

    def run(
        self, hidden: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor, run_experts: RunExperts
    ) -> torch.Tensor:
        """See exchange.Exchange."""
        num_tokens, topk = expert_ids.shape
        flat_ids = expert_ids.flatten()
        owners = flat_ids // self._experts_per_rank
        order = torch.argsort(owners, stable=True)  # the (token, choice) pairs by owner
        sent = torch.bincount(owners, minlength=self._num_ranks)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        sent_counts, received_counts = sent.tolist(), received.tolist()

        local_ids = (flat_ids % self._experts_per_rank)[order]
        payload = _pack(hidden[order // topk], local_ids, expert_weights.flatten()[order])
        arrived = self._swap(payload, sent_counts, received_counts)
        outputs = run_experts(*_unpack(arrived, hidden.dtype))
        returned = self._swap(outputs.contiguous(), received_counts, sent_counts)
        by_choice = torch.empty_like(returned)
        by_choice[order] = returned
        return sum_in_order(by_choice.view(num_tokens, topk, hidden.shape[1]))

    def _swap(self, rows: torch.Tensor, sent_counts: list[int], received_counts: list[int]) -> torch.Tensor:
        arrived = rows.new_empty((sum(received_counts), rows.shape[1]))
        dist.all_to_all_single(arrived, rows, received_counts, sent_counts, group=self._group)
        return arrived


def _pack(rows: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[M, bytes] uint8: the row, its local expert (int32), its weight (fp32)."""
    columns = (rows.contiguous(), expert_ids.int().unsqueeze(1), weights.float().unsqueeze(1))
    return torch.cat([column.view(torch.uint8) for column in columns], dim=1)


def _unpack(payload: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rows [M, hidden], local experts [M] int64, weights [M] fp32) of what `_pack` made."""
    row_bytes, expert_ids, weights = payload.tensor_split([payload.shape[1] - 8, payload.shape[1] - 4], dim=1)
    return (
        row_bytes.contiguous().view(dtype),
        expert_ids.contiguous().view(torch.int32).squeeze(1).long(),
        weights.contiguous().view(torch.float32).squeeze(1),
    )
