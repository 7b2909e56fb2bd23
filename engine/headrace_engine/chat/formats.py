"""The prompt formats of DeepSeek-V4 and V4.1: from turns to the pieces of a prompt.

bos, the system text, then turns: `<｜User｜>text`, then the header of the answer, `<｜Assistant｜>` with `<think>` or
`</think>`, then `reasoning</think>answer<eos>`. The header belongs to the turn before the answer, so the prompt ends
with the header of the answer to come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace_engine.chat.dsml import V4_DIALECT, V41_DIALECT, Dialect, to_json
from headrace_engine.chat.errors import ChatError
from headrace_engine.chat.messages import ToolResult, Turn
from headrace_engine.chat.options import ChatOptions, Effort, read_options
from headrace_engine.chat.prompt import ASSISTANT, BOS, END_THINK, EOS, LATEST_REMINDER, SYSTEM, THINK, USER, Prompt
from headrace_engine.chat.texts import RESPONSE_FORMAT, V4_EFFORTS, v41_effort


class ChatFormat:
    """What V4 and V4.1 have in common; the methods below `render` are where they differ."""

    dialect: Dialect

    def __init__(self, *, thinks_by_default: bool = True) -> None:
        self._thinks_by_default = thinks_by_default

    def options(self, effort: Any, template_kwargs: Mapping[str, Any] | None) -> ChatOptions:
        """From the request's `reasoning_effort` and `chat_template_kwargs`. Raises ChatError."""
        is_thinking, asked, drops_reasoning = read_options(
            effort, template_kwargs, thinks_by_default=self._thinks_by_default
        )
        return ChatOptions(is_thinking, self.effort_of(asked), drops_reasoning)

    def render(self, turns: Sequence[Turn], options: ChatOptions) -> list[str]:
        """The prompt's pieces: markers and texts (see prompt.py)."""
        drops_reasoning = options.drops_reasoning and not any(turn.functions for turn in turns)
        if options.is_thinking and drops_reasoning:
            last_user = self._last_user(turns)
            turns = [turn for index, turn in enumerate(turns) if turn.role != "developer" or index >= last_user]
        last_user = self._last_user(turns)
        prompt = Prompt()
        prompt.marker(BOS)
        for index, turn in enumerate(turns):
            if index == 0:
                self._begin(prompt, turn, options)
            is_shown = options.is_thinking and (not drops_reasoning or index > last_user)
            self._write(prompt, turn, index, is_shown)
            following = turns[index + 1].role if index + 1 < len(turns) else None
            if following in (None, "assistant", "latest_reminder") and self._is_answered(turn, index, following):
                prompt.marker(ASSISTANT)
                opens_thought = options.is_thinking and (not drops_reasoning or index >= last_user)
                prompt.marker(THINK if opens_thought else END_THINK)
        return prompt.pieces()

    def _write(self, prompt: Prompt, turn: Turn, index: int, shows_reasoning: bool) -> None:
        if turn.role == "assistant":
            if shows_reasoning:
                prompt.text(turn.reasoning)
                prompt.marker(END_THINK)
            prompt.text(turn.text)
            if turn.calls:
                self.dialect.write_calls(prompt, turn.calls)
            prompt.marker(EOS)
            return
        if turn.role == "user":
            prompt.marker(USER)
            prompt.text("\n\n".join(map(_part_text, turn.parts)))
            return
        if turn.role == "latest_reminder":
            prompt.marker(LATEST_REMINDER)
        elif turn.role == "developer":
            prompt.marker(USER)
        elif index > 0:
            self._begin_system(prompt)
        prompt.text(turn.text)
        if turn.functions:
            self.dialect.write_tools(prompt, turn.functions)
        if turn.response_format:
            prompt.text(RESPONSE_FORMAT + to_json(turn.response_format))

    def _last_user(self, turns: Sequence[Turn]) -> int:
        """Index of the turn that the answer to come answers; -1 if there is none."""
        return max((index for index, turn in enumerate(turns) if self._is_users(turn, index)), default=-1)

    # --- where the formats differ ---

    def effort_of(self, asked: Effort | None) -> Effort:
        """The effort that a request asks for, None for the default. Raises ChatError."""
        raise NotImplementedError

    def _begin(self, prompt: Prompt, first: Turn, options: ChatOptions) -> None:
        """What comes between bos and the first turn."""
        raise NotImplementedError

    def _begin_system(self, prompt: Prompt) -> None:
        """What comes before the text of a system turn that is not the first."""
        raise NotImplementedError

    def _is_users(self, turn: Turn, index: int) -> bool:
        """Whether reasoning before this turn is history."""
        raise NotImplementedError

    def _is_answered(self, turn: Turn, index: int, following: str | None) -> bool:
        """Whether the header of an answer comes behind this turn, if the `following` role allows one."""
        raise NotImplementedError


_V41_BUDGETS = {"low": 50, "high": 75, "xhigh": 75, "max": 100}


class V4Format(ChatFormat):
    """DeepSeek-V4: effort in words, one system text."""

    dialect = V4_DIALECT

    def effort_of(self, asked: Effort | None) -> Effort:
        if asked is None or asked in ("high", "xhigh"):
            return "high"
        if asked in ("minimal", "low", "medium"):
            return "low"
        if asked == "max":
            return "max"
        raise ChatError(
            f"reasoning_effort {asked!r} is not one of none, minimal, low, medium, high, xhigh, max", "reasoning_effort"
        )

    def _begin(self, prompt: Prompt, first: Turn, options: ChatOptions) -> None:
        if options.is_thinking:
            prompt.text(V4_EFFORTS[str(options.effort)])

    def _begin_system(self, prompt: Prompt) -> None:
        pass

    def _is_users(self, turn: Turn, index: int) -> bool:
        return turn.role in ("user", "developer")

    def _is_answered(self, turn: Turn, index: int, following: str | None) -> bool:
        is_bare_system = turn.role == "system" and following in (None, "assistant")
        return turn.role in ("user", "developer") or is_bare_system


class V41Format(ChatFormat):
    """DeepSeek-V4.1: effort as a number, system turns anywhere, tool results within the turn they serve."""

    dialect = V41_DIALECT

    def effort_of(self, asked: Effort | None) -> Effort:
        if asked is None:
            return _V41_BUDGETS["high"]
        if isinstance(asked, str) and asked in _V41_BUDGETS:
            return _V41_BUDGETS[asked]
        if isinstance(asked, int) and 1 <= asked <= 100:
            return asked
        raise ChatError(
            f"reasoning_effort {asked!r} is neither none, low, high, xhigh or max nor a number of 1 to 100",
            "reasoning_effort",
        )

    def _begin(self, prompt: Prompt, first: Turn, options: ChatOptions) -> None:
        if options.is_thinking or first.role == "system":
            prompt.marker(SYSTEM)
        if options.is_thinking:
            prompt.text(v41_effort(int(options.effort)))

    def _begin_system(self, prompt: Prompt) -> None:
        prompt.marker(SYSTEM)

    def _is_users(self, turn: Turn, index: int) -> bool:
        is_asked = turn.role == "user" and turn.has_words
        return is_asked or turn.role == "developer" or (turn.role == "system" and index > 0)

    def _is_answered(self, turn: Turn, index: int, following: str | None) -> bool:
        return turn.role in ("user", "developer") or (turn.role == "system" and index > 0)


_FORMATS: dict[str, type[ChatFormat]] = {"deepseek_v4": V4Format, "deepseek_v41": V41Format}


def format_of(model_type: str, *, thinks_by_default: bool = True) -> ChatFormat:
    """The prompt format of a checkpoint, by the model_type of its config.json. Raises KeyError for unknown ones."""
    return _FORMATS[model_type](thinks_by_default=thinks_by_default)


def _part_text(part: str | ToolResult) -> str:
    return part if isinstance(part, str) else f"<tool_result>{part.text}</tool_result>"
