"""A prompt as pieces: markers, which are single tokens, and the texts between them.

A tokenizer splits a text at added tokens before it does anything else, so every text between two markers can be
tokenized alone, and kept for the next turn. A client's text never becomes a marker, whatever it says: nobody can forge
a turn with it.
"""

from __future__ import annotations

import re

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
SYSTEM = "<｜System｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
LATEST_REMINDER = "<｜latest_reminder｜>"
THINK = "<think>"
END_THINK = "</think>"
DSML = "｜DSML｜"

MARKERS = (BOS, EOS, SYSTEM, USER, ASSISTANT, LATEST_REMINDER, THINK, END_THINK, DSML)
_OWN = re.compile(f"({'|'.join(map(re.escape, (THINK, END_THINK, DSML)))})")


class Marker(str):
    """A piece of a prompt that is one token of the vocabulary."""


class Prompt:
    """A prompt in the making. `pieces`: markers, and non-empty texts of which no two are neighbours."""

    def __init__(self) -> None:
        self._pieces: list[Marker | list[str]] = []

    def marker(self, marker: str) -> None:
        self._pieces.append(Marker(marker))

    def text(self, text: str) -> None:
        """A client's text: characters, never markers."""
        if not text:
            return
        if self._pieces and isinstance(self._pieces[-1], list):
            self._pieces[-1].append(text)
        else:
            self._pieces.append([text])

    def own(self, text: str) -> None:
        """A text of the format's own, in which markers mean themselves."""
        for index, part in enumerate(_OWN.split(text)):
            if index % 2:
                self.marker(part)
            else:
                self.text(part)

    def pieces(self) -> list[str]:
        return [piece if isinstance(piece, Marker) else "".join(piece) for piece in self._pieces]
