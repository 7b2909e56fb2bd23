"""What comes after DSpark's last stage: base logits, the Markov transition from token to token, and confidence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace_engine import kernels
from headrace_engine.models.drafter import Drafts


@dataclass
class DraftHeads:
    norm: torch.Tensor  # [hidden] fp32
    head: kernels.Weight  # [vocab, hidden], the main model's
    markov_embedding: torch.Tensor  # [vocab, rank] dt, by the token before
    markov_head: kernels.Weight  # [vocab, rank]
    confidence: torch.Tensor  # [hidden + rank] fp32

    def run(self, x: torch.Tensor, anchors: torch.Tensor, num_drafts: int, eps: float) -> Drafts:
        """x [D * K, hidden] dt: collapsed, not normed, K = num_drafts for each block; anchors [D]: the tokens before.

        Only the transition goes from left to right: row k's logits depend on the token drawn at k - 1.
        """
        base = kernels.linear(kernels.rms_norm(x, self.norm, eps), self.head, torch.float32)
        base = base.view(len(anchors), num_drafts, base.shape[1])
        hidden = x.view(len(anchors), num_drafts, x.shape[1]).float()
        previous, columns = anchors, []
        for row in range(num_drafts):
            embedded = F.embedding(previous, self.markov_embedding)
            logits = base[:, row] + kernels.linear(embedded, self.markov_head, torch.float32)
            confidence = torch.sigmoid(torch.cat([hidden[:, row], embedded.float()], dim=1) @ self.confidence)
            previous = logits.argmax(dim=1)
            columns.append((previous, logits, confidence))
        token_ids, logits, confidences = (torch.stack(column, dim=1) for column in zip(*columns, strict=True))
        return Drafts(token_ids, logits, confidences)
