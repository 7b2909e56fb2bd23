"""What the engine asks of a drafter: tokens that may come next, from the main model's streams and its last token.

A drafter has a cache of its own beside the main model's. Each step hands on what the main model computed (`StreamTap`,
given to its forward) with the token that follows each row; the drafter writes its cache for those rows and proposes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from headrace_engine.models.errors import ModelError
from headrace_engine.models.protocol import CacheGroup, ForwardBatch

if TYPE_CHECKING:
    from headrace_engine.ep.exchange import Exchange


@dataclass(frozen=True)
class Drafts:
    """K tokens proposed to D sequences each, to follow the token that the main model chose last."""

    token_ids: torch.Tensor  # [D, K] int64, the most likely of logits
    logits: torch.Tensor  # [D, K, vocab] fp32
    confidences: torch.Tensor | None  # [D, K] fp32: chance that it is accepted if those before it are


Tap = Callable[[int, torch.Tensor], None]  # (entry, streams [T, N, hidden] dt), called by a main model's forward


class StreamTap:
    """A Tap that keeps the streams at some layers' entries; entry `num_layers` is the model's end."""

    def __init__(self, entries: Sequence[int], *, is_mean: bool) -> None:
        """is_mean: the mean over the streams is wanted, else all of them."""
        self._entries, self._is_mean = frozenset(entries), is_mean
        self._parts: list[torch.Tensor] = []

    def __call__(self, entry: int, streams: torch.Tensor) -> None:
        """streams [T, N, hidden] dt, which later layers change in place."""
        if entry in self._entries:
            self._parts.append(streams.mean(dim=1) if self._is_mean else streams.flatten(1).clone())

    def features(self) -> torch.Tensor:
        """[T, entries * hidden] dt, or [T, entries * N * hidden]; entries in ascending order."""
        return torch.cat(self._parts, dim=1)


class Drafter(Protocol):
    """One rank's share of a drafter. Embedding and head are the main model's."""

    num_drafts: int  # K
    num_experts: int  # of the whole drafter, not of this rank
    cache_groups: tuple[CacheGroup, ...]

    def tap(self) -> StreamTap:
        """What to give to one forward of the main model."""
        ...

    def draft(
        self,
        batch: ForwardBatch,
        features: torch.Tensor,
        next_ids: torch.Tensor,
        wanted: torch.Tensor,
        cache: Mapping[str, torch.Tensor],
        exchange: Exchange,
    ) -> Drafts:
        """Writes the cache for the batch's rows, and drafts for its sequences `wanted` [D].

        batch: rows that the main model has run and that are there to stay (of drafts it verified, those accepted);
        features: of these rows, from the tap; next_ids [T]: the token after each row; of a sequence's last one the
        token just chosen, after which drafts begin. exchange: over this drafter's experts. A collective, as the main
        model's forward: every rank calls it, with T = 0 and D = 0 if it has nothing.
        """
        ...


def check_num_drafts(num_drafts: int | None, block_size: int) -> None:
    """Of a drafter whose rows see its whole block. Raises ModelError for another number than it was trained for."""
    if num_drafts not in (None, block_size):
        raise ModelError(f"this drafter drafts {block_size} tokens at once, not {num_drafts}")
