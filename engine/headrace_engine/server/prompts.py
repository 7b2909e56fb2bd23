"""From a chat's pieces to token ids. What was tokenized for one turn of a conversation is not tokenized for the next.

Tokenizers split a text at added tokens before anything else, so a text between two markers has the same tokens
whatever surrounds it. Texts and their tokens are kept, the least recently used dropped first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from headrace_engine.chat.prompt import Marker
from headrace_engine.server.tokenize import Tokenizer

MAX_CACHED_TOKENS = 4 << 20  # about 50 MB: a token id takes 8 bytes, its text about 4


class PromptEncoder:
    """Thread-safe. Equal to tokenizing the joined pieces at once, but for a client's text that spells a marker."""

    def __init__(self, tokenizer: Tokenizer, max_cached_tokens: int = MAX_CACHED_TOKENS) -> None:
        self.tokenizer = tokenizer
        self._max_cached_tokens = max_cached_tokens
        self._cache: OrderedDict[str, list[int]] = OrderedDict()
        self._num_cached_tokens = 0
        self._lock = threading.Lock()
        # One object for each token id, however often it is cached: a list then has 8 bytes a token instead of 40.
        self._ids: dict[int, int] = {}

    def encode(self, pieces: Sequence[str]) -> list[int]:
        token_ids: list[int] = []
        for run in self._runs(pieces):
            if isinstance(run, int):
                token_ids.append(run)
            else:
                token_ids += self._text(run)
        return token_ids

    def num_new_chars(self, pieces: Sequence[str]) -> int:
        """Characters that `encode` would have to tokenize."""
        runs = self._runs(pieces)
        with self._lock:
            return sum(len(run) for run in runs if isinstance(run, str) and run not in self._cache)

    def _runs(self, pieces: Sequence[str]) -> list[int | str]:
        """Markers as token ids, and the texts between them; a marker that the vocabulary does not have is text."""
        runs: list[int | str] = []
        for piece in pieces:
            marker_id = self.tokenizer.marker_id(piece) if isinstance(piece, Marker) else None
            if marker_id is not None:
                runs.append(marker_id)
            elif runs and isinstance(runs[-1], str):
                runs[-1] += piece
            else:
                runs.append(str(piece))
        return runs

    def _text(self, text: str) -> list[int]:
        with self._lock:
            known = self._cache.get(text)
            if known is not None:
                self._cache.move_to_end(text)
                return known
        token_ids = self.tokenizer.encode_plain(text)  # without the lock: it takes long, and others may go on
        with self._lock:
            token_ids = [self._ids.setdefault(token_id, token_id) for token_id in token_ids]
            self._store(text, token_ids)
        return token_ids

    def _store(self, text: str, token_ids: list[int]) -> None:
        if text in self._cache or len(token_ids) > self._max_cached_tokens:
            return
        self._cache[text] = token_ids
        self._num_cached_tokens += len(token_ids)
        while self._num_cached_tokens > self._max_cached_tokens:
            _, dropped = self._cache.popitem(last=False)
            self._num_cached_tokens -= len(dropped)
