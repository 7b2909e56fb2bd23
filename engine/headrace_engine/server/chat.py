"""From chat messages to a DeepSeek-V4 prompt, in chat mode (the answer begins at once, without reasoning).

bos, the system text, then turns: `<｜User｜>text`, and `<｜Assistant｜></think>answer<eos>`. The header of the answer
to come (`<｜Assistant｜></think>`) ends the prompt. Only the markers are special tokens: the same characters in a
client's text stay text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace_engine.server.errors import ApiError, bad_request
from headrace_engine.server.tokenize import Tokenizer

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
END_OF_THINKING = "</think>"
_USER_ROLES = ("user", "developer")


class Marker(str):
    """A piece of a prompt in which special tokens mean themselves."""


def render(messages: Sequence[dict[str, Any]]) -> list[str]:
    """The prompt as pieces: `Marker`s, and plain text of the client's. Raises ApiError (400)."""
    if not messages:
        raise _bad("messages must not be empty", None)
    system: list[str] = []
    turns: list[tuple[str, str]] = []  # role, text; consecutive user messages are one turn
    for index, message in enumerate(messages):
        role, text = _role_and_text(message, index)
        if role == "system":
            system.append(text)
        elif turns and turns[-1][0] == role == "user":
            turns[-1] = (role, turns[-1][1] + "\n\n" + text)
        else:
            turns.append((role, text))
    if turns and turns[-1][0] == "assistant":
        raise _bad("the last message must not be the assistant's: there is nothing to answer", len(messages) - 1)
    pieces: list[str] = [Marker(BOS), "\n\n".join(system)]
    for position, (role, text) in enumerate(turns):
        if role == "user":
            pieces += [Marker(USER), text, Marker(ASSISTANT + END_OF_THINKING)]
        else:
            if position == 0:
                pieces.append(Marker(ASSISTANT + END_OF_THINKING))
            pieces += [text, Marker(EOS)]
    if not turns:
        pieces.append(Marker(ASSISTANT + END_OF_THINKING))
    return [piece for piece in pieces if piece]


def encode(pieces: Sequence[str], tokenizer: Tokenizer) -> list[int]:
    """Token ids of a rendered prompt."""
    token_ids: list[int] = []
    for piece in pieces:
        token_ids += tokenizer.encode_marker(piece) if isinstance(piece, Marker) else tokenizer.encode_plain(piece)
    return token_ids


def _role_and_text(message: dict[str, Any], index: int) -> tuple[str, str]:
    role = message.get("role")
    if role in _USER_ROLES:
        role = "user"
    elif role not in ("system", "assistant"):
        raise _bad(f"messages[{index}].role {role!r} is not supported (system, user, assistant)", index)
    for name in ("tool_calls", "function_call"):
        if message.get(name):
            raise _bad(f"messages[{index}].{name} is not supported", index)
    return role, _text(message.get("content"), index)


def _text(content: Any, index: int) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _bad(f"messages[{index}].content must be a string or a list of text parts", index)
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise _bad(f"messages[{index}].content: only parts of type text are supported", index)
        texts.append(part["text"])
    return "\n".join(texts)


def _bad(message: str, index: int | None) -> ApiError:
    return bad_request(message, "messages" if index is None else f"messages[{index}]")
