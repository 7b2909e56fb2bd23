"""What a request says of thinking: whether, how hard, and whether reasoning of earlier turns stays in the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace_engine.chat.errors import ChatError

Effort = str | int
_SWITCHES = ("thinking", "enable_thinking", "drop_thinking")


@dataclass(frozen=True)
class ChatOptions:
    """effort: as the format knows it. drops_reasoning: of turns before the last user's, if there are no tools."""

    is_thinking: bool = True
    effort: Effort = "high"
    drops_reasoning: bool = True


def read_options(
    effort: Any, template_kwargs: Mapping[str, Any] | None, *, thinks_by_default: bool
) -> tuple[bool, Effort | None, bool]:
    """(is_thinking, effort if one was asked for, drops_reasoning) of a request's fields. Raises ChatError.

    `thinking` (or `enable_thinking`) says whether to think; without it an effort does ("none": do not).
    """
    kwargs = dict(template_kwargs or {})
    for name, value in kwargs.items():
        if name not in (*_SWITCHES, "reasoning_effort"):
            raise ChatError(f"chat_template_kwargs.{name} is not supported", "chat_template_kwargs")
        if name in _SWITCHES and not isinstance(value, bool):
            raise ChatError(f"chat_template_kwargs.{name} must be true or false", "chat_template_kwargs")
    nested = kwargs.get("reasoning_effort")
    if effort is not None and nested is not None and effort != nested:
        message = f"reasoning_effort is {effort!r}, chat_template_kwargs.reasoning_effort {nested!r}"
        raise ChatError(message, "reasoning_effort")
    effort = nested if effort is None else effort
    switches = [kwargs[name] for name in ("thinking", "enable_thinking") if name in kwargs]
    is_thinking = any(switches) if switches else thinks_by_default or effort is not None
    if effort == "none":
        is_thinking, effort = False, None
    if effort is not None and (isinstance(effort, bool) or not isinstance(effort, str | int)):
        raise ChatError("reasoning_effort must be a word or a number", "reasoning_effort")
    return is_thinking, effort, kwargs.get("drop_thinking", True)
