"""A chat request: its prompt, and how its answer is to be read."""

from __future__ import annotations

from dataclasses import dataclass

from headrace_engine.chat.errors import ChatError
from headrace_engine.chat.formats import ChatFormat
from headrace_engine.chat.messages import read_functions, read_turns, with_tools
from headrace_engine.chat.parse import AnswerParser, Tools, tools_of
from headrace_engine.chat.prompt import END_THINK, THINK, Marker
from headrace_engine.server.errors import ApiError, bad_request
from headrace_engine.server.schema import ChatBody


@dataclass(frozen=True)
class ChatPlan:
    """pieces: the prompt (see chat/prompt.py). tools: those that the model may call, None if there are none."""

    pieces: list[str]
    is_thinking: bool
    tools: Tools | None
    max_calls: int | None

    def parser(self) -> AnswerParser:
        """For one answer."""
        return AnswerParser(is_thinking=self.is_thinking, tools=self.tools, max_calls=self.max_calls)


def plan_chat(body: ChatBody, chat_format: ChatFormat) -> ChatPlan:
    """Raises ApiError (400)."""
    uses_tools = _uses_tools(body)
    try:
        functions = read_functions(body.tools or [])
        turns = read_turns(body.messages)
        if uses_tools:
            turns = with_tools(turns, functions)
        else:
            for turn in turns:
                turn.functions = []
        options = chat_format.options(body.reasoning_effort, body.chat_template_kwargs)
        pieces = chat_format.render(turns, options)
    except ChatError as error:
        raise bad_request(str(error), error.param) from None
    if pieces[-1] not in (THINK, END_THINK) or not isinstance(pieces[-1], Marker):
        index = len(body.messages) - 1
        message = f"messages[{index}]: there is nothing to answer behind a message of role {body.messages[-1]['role']}"
        raise bad_request(message, f"messages[{index}]")
    offered = [function for turn in turns for function in turn.functions]
    max_calls = 1 if body.parallel_tool_calls is False else None
    return ChatPlan(pieces, pieces[-1] == THINK, tools_of(offered) if offered else None, max_calls)


def _uses_tools(body: ChatBody) -> bool:
    """Whether the model is told of tools. tool_choice "none" leaves them out of the prompt: none can be called."""
    choice = body.tool_choice
    if choice in (None, "auto"):
        return True
    if choice == "none":
        return False
    if choice == "required" or isinstance(choice, dict):
        raise _refused(f"tool_choice={choice!r} is not supported: a call cannot be forced. Use auto or none")
    raise _refused(f"tool_choice={choice!r} is neither auto nor none")


def _refused(message: str) -> ApiError:
    return bad_request(message, "tool_choice", "unsupported_value")
