"""How likely a model held tokens to be."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace_engine.core import TokenScore


def score(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenScore]:
    """The score of one token for each row of logits [R, vocab] (fp32), with the num_top likeliest of the row."""
    chosen = torch.tensor(token_ids, dtype=torch.int64)[:, None]
    normalizers = torch.logsumexp(logits, dim=-1, keepdim=True)
    own = logits.gather(1, chosen)
    ranks = (logits > own).sum(-1) + 1
    top, top_ids = torch.topk(logits, min(num_top, logits.shape[1]))
    columns = ((own - normalizers)[:, 0], ranks, top_ids, top - normalizers)
    return [
        TokenScore(token_id, logprob, rank, tuple(zip(ids, logprobs, strict=True)))
        for token_id, (logprob, rank, ids, logprobs) in zip(
            token_ids, zip(*(column.tolist() for column in columns), strict=True), strict=True
        )
    ]
