"""The groups of tokens that a step completes, and where the entries made of them go."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from headrace_engine.models.protocol import ForwardBatch


def sequence_of_token(batch: ForwardBatch) -> torch.Tensor:
    """[T]: the sequence of each token."""
    device = batch.token_ids.device
    lengths = torch.tensor(batch.query_lens, dtype=torch.int64, device=device)
    return torch.repeat_interleave(torch.arange(len(batch.query_lens), device=device), lengths)


@dataclass(frozen=True)
class Closing:
    """The groups of `ratio` tokens that a step completes, C of them."""

    ratio: int
    tokens: torch.Tensor  # [C], row of each group's last token
    sequences: torch.Tensor  # [C]
    groups: torch.Tensor  # [C], number of the group in its sequence

    @property
    def first_positions(self) -> torch.Tensor:
        """[C], where an entry is rotated to."""
        return self.groups * self.ratio

    def places(self, batch: ForwardBatch, per_block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(blocks [C], numbers in them [C]) of the entries in a paged group with so many to a block."""
        blocks = batch.block_tables[self.sequences, self.groups // per_block].long()
        return blocks, self.groups % per_block


def closing_groups(batch: ForwardBatch, sequence: torch.Tensor, ratio: int) -> Closing:
    """sequence [T]: the sequence of each token."""
    tokens = torch.nonzero(batch.positions % ratio == ratio - 1).squeeze(1)
    return Closing(ratio, tokens, sequence[tokens], batch.positions[tokens] // ratio)


@dataclass(frozen=True)
class Room:
    """Pages outside the cache for the entries that a step makes, where they can be changed before they are kept."""

    pages: torch.Tensor  # [pages, 1, entries per page, n]
    batch: ForwardBatch  # whose block tables lead to these pages
    places: tuple[torch.Tensor, torch.Tensor]  # [C] each: page, and number in it

    def entries(self) -> torch.Tensor:
        """[C, n], once they are written."""
        page, number = self.places
        return self.pages[page, 0, number]


def make_room(closing: Closing, batch: ForwardBatch, per_page: int, dim: int, dtype: torch.dtype) -> Room:
    """Room for entries [C, dim] of the groups that close, so many to a page."""
    tables = torch.zeros_like(batch.block_tables)
    blocks = closing.sequences * tables.shape[1] + closing.groups // per_page
    used, page = torch.unique(blocks, return_inverse=True)
    tables.view(-1)[used] = torch.arange(len(used), dtype=tables.dtype, device=tables.device)
    pages = torch.empty((len(used), 1, per_page, dim), dtype=dtype, device=tables.device)
    return Room(pages, dataclasses.replace(batch, block_tables=tables), (page, closing.groups % per_page))
