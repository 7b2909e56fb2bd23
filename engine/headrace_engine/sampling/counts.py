"""How often each token occurs in a sequence, kept up to date as it grows. Pure, no torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class TokenCounts:
    """The distinct tokens of a prompt and its answer, and how often each was generated.

    `token_ids` [U] int64 and `num_generated` [U] float64 are views that the next `update` may replace.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        distinct = np.unique(np.asarray(prompt, dtype=np.int64))
        self._places = {token: place for place, token in enumerate(distinct.tolist())}
        self._num_distinct = len(distinct)
        self._token_ids = np.concatenate([distinct, np.zeros(64, dtype=np.int64)])
        self._num_generated = np.zeros(len(self._token_ids))
        self._num_seen = len(prompt)

    @property
    def token_ids(self) -> np.ndarray:
        return self._token_ids[: self._num_distinct]

    @property
    def num_generated(self) -> np.ndarray:
        return self._num_generated[: self._num_distinct]

    def update(self, token_ids: Sequence[int]) -> None:
        """Count what the sequence (prompt and answer) has gained since the last call."""
        for position in range(self._num_seen, len(token_ids)):
            token = token_ids[position]
            place = self._places.setdefault(token, self._num_distinct)
            if place == self._num_distinct:
                self._append(token)
            self._num_generated[place] += 1
        self._num_seen = len(token_ids)

    def _append(self, token: int) -> None:
        if self._num_distinct == len(self._token_ids):
            self._token_ids = np.concatenate([self._token_ids, np.zeros_like(self._token_ids)])
            self._num_generated = np.concatenate([self._num_generated, np.zeros_like(self._num_generated)])
        self._token_ids[self._num_distinct] = token
        self._num_distinct += 1
