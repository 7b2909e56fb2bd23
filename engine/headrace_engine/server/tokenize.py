"""Text to token ids and back: whole prompts one way, one answer's tokens as they come the other way."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as HfTokenizer

from headrace_engine.chat.prompt import DSML, END_THINK, MARKERS, THINK

REPLACEMENT = "\ufffd"  # what bytes that are no (complete) character decode to
_SHOWN = (THINK, END_THINK, DSML)
_MAX_PENDING = 16  # tokens that may be an incomplete character; UTF-8 has at most 4 bytes


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level vocabularies write for bytes: printable ones for themselves, the others from
    U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_BYTES = _byte_alphabet()


class TokenizerError(ValueError):
    """The checkpoint's tokenizer cannot be used."""


class Tokenizer:
    """A checkpoint's tokenizer.json. Encoding releases the interpreter lock; use a thread for long texts."""

    def __init__(self, model_dir: Path) -> None:
        file = model_dir / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(f"{model_dir} has no tokenizer.json")
        self.file = file
        try:
            self._tokenizer: HfTokenizer = HfTokenizer.from_file(str(file))
            self._plain: HfTokenizer = HfTokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{file} cannot be read: {error}") from error
        self.thinks_by_default = _thinks_by_default(model_dir / "tokenizer_config.json")
        added = {
            token.content: (token_id, token) for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
        }
        self._added = frozenset(added)
        self._marker_ids = {marker: added[marker][0] for marker in MARKERS if marker in added}
        # Vocabularies call some markers ordinary tokens; in a client's text none may be a token.
        self._plain.add_special_tokens(
            [AddedToken(marker, special=True, normalized=False) for marker in self._marker_ids]
        )
        self._plain.encode_special_tokens = True
        self._hidden = {
            token_id for content, (token_id, token) in added.items() if token.special and content not in _SHOWN
        }

    def encode(self, text: str) -> list[int]:
        """A completion's prompt, with what the tokenizer adds to a text by itself (bos)."""
        return list(self._tokenizer.encode(text, add_special_tokens=True).ids)

    def marker_id(self, marker: str) -> int | None:
        """The token of a chat's marker; None if the vocabulary does not have it."""
        return self._marker_ids.get(marker)

    def encode_plain(self, text: str) -> list[int]:
        """A client's text, in which special tokens are ordinary characters: nobody can forge a turn with it."""
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for by itself: perhaps a part of a character."""
        token = self._tokenizer.id_to_token(token_id) or ""
        if token in self._added or not all(char in _BYTES for char in token):
            return token.encode()
        return bytes(_BYTES[char] for char in token)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens, but for those that reasoning and tool calls are read by."""
        shown = [token_id for token_id in token_ids if token_id not in self._hidden]
        return str(self._tokenizer.decode(shown, skip_special_tokens=False))


def _thinks_by_default(file: Path) -> bool:
    """Whether chats think if a request does not say. A checkpoint's tokenizer_config.json may have
    `"chat_template_kwargs": {"thinking": false}`, as requests may."""
    try:
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        value = config.get("chat_template_kwargs", {}).get("thinking", True)
    except (OSError, ValueError, AttributeError) as error:
        raise TokenizerError(f"{file} cannot be read: {error}") from error
    if not isinstance(value, bool):
        raise TokenizerError(f"{file}: chat_template_kwargs.thinking must be true or false, not {value!r}")
    return value


class Detokenizer:
    """One answer's text, token by token. A character whose bytes are spread over tokens comes with its last one.

    Tokens are decoded in the context of the piece before them, since decoders treat the start of a text specially.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._first = 0  # of the context
        self._done = 0  # tokens whose text has been returned
        self._context = ""  # text of tokens [first, done)

    def add(self, token_id: int) -> str:
        """The text that this token completes, perhaps empty."""
        self._token_ids.append(token_id)
        text = self._tokenizer.decode(self._token_ids[self._first :])
        if text.endswith(REPLACEMENT) and len(self._token_ids) - self._done < _MAX_PENDING:
            return ""
        return self._advance(text)

    def finish(self) -> str:
        """What is left when no more tokens come: an incomplete character, as U+FFFD."""
        if self._done == len(self._token_ids):
            return ""
        return self._advance(self._tokenizer.decode(self._token_ids[self._first :]))

    def _advance(self, text: str) -> str:
        new = text[len(self._context) :]
        self._first = self._done
        self._done = len(self._token_ids)
        self._context = self._tokenizer.decode(self._token_ids[self._first :])
        del self._token_ids[: self._first]
        self._done -= self._first
        self._first = 0
        return new


class StopMatcher:
    """Cuts a text at the first stop string, however it is spread over pieces. Holds back what may begin one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stop: str | None = None  # the one that was found

    @property
    def is_stopped(self) -> bool:
        return self.stop is not None

    def add(self, piece: str) -> str:
        """The text that can be shown now; nothing after `is_stopped`."""
        if not self._stops:
            return piece
        if self.is_stopped:
            return ""
        text = self._held + piece
        hits = [(position, stop) for stop in self._stops if (position := text.find(stop)) >= 0]
        if hits:
            position, self.stop = min(hits)
            self._held = ""
            return text[:position]
        num_held = self._num_open(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """What was held back: the text ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _num_open(self, text: str) -> int:
        """Length of the longest end of the text that is the beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
