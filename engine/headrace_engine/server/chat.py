"""A chat request: its prompt, and how its answer is to be read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from headrace_engine.chat.call_grammar import calls_grammar, calls_or_form_grammar, strict_grammar
from headrace_engine.chat.errors import ChatError
from headrace_engine.chat.formats import ChatFormat
from headrace_engine.chat.messages import read_functions, read_turns, with_tools
from headrace_engine.chat.parse import AnswerParser, Tools, tools_of
from headrace_engine.chat.prompt import END_THINK, THINK, Marker
from headrace_engine.server.errors import bad_request
from headrace_engine.server.schema import ChatBody


@dataclass(frozen=True)
class ChatPlan:
    """pieces: the prompt (see chat/prompt.py). tools: those that the model may call, None if there are none.

    max_calls: None: any number. Grammars in Lark's notation, the first that there is holds. forced: of the calls that
    the request insists on, behind the thought. beside_form: of calls, or else an answer of the form that the request
    wants, if it wants one. strict: of the whole answer, if it may have calls that must keep to schemas.
    """

    pieces: list[str]
    is_thinking: bool
    tools: Tools | None
    max_calls: int | None
    forced: str | None = None
    beside_form: str | None = None
    strict: str | None = None

    def parser(self) -> AnswerParser:
        """For one answer."""
        return AnswerParser(is_thinking=self.is_thinking, tools=self.tools, max_calls=self.max_calls)


def plan_chat(body: ChatBody, chat_format: ChatFormat) -> ChatPlan:
    """Raises ApiError (400)."""
    choice = _read_choice(body)
    try:
        functions = read_functions(body.tools or [])
        turns = read_turns(body.messages)
        if choice == "none":
            for turn in turns:
                turn.functions = []
        else:
            turns = with_tools(turns, functions)
        options = chat_format.options(body.reasoning_effort, body.chat_template_kwargs)
        pieces = chat_format.render(turns, options)
    except ChatError as error:
        raise bad_request(str(error), error.param) from None
    if pieces[-1] not in (THINK, END_THINK) or not isinstance(pieces[-1], Marker):
        index = len(body.messages) - 1
        message = f"messages[{index}]: there is nothing to answer behind a message of role {body.messages[-1]['role']}"
        raise bad_request(message, f"messages[{index}]")
    offered = [function for turn in turns for function in turn.functions]
    max_calls = 1 if body.parallel_tool_calls is False or isinstance(choice, Named) else None
    plan = ChatPlan(pieces, pieces[-1] == THINK, tools_of(offered) if offered else None, max_calls)
    dialect = chat_format.dialect
    if choice == "required" or isinstance(choice, Named):
        return replace(plan, forced=calls_grammar(dialect, _forced_functions(choice, offered), max_calls))
    if offered and (body.response_format or body.structured_outputs):
        plan = replace(plan, beside_form=calls_or_form_grammar(dialect, offered, max_calls))
    if any(function.get("strict") for function in offered):
        plan = replace(plan, strict=strict_grammar(dialect, offered, max_calls))
    return plan


@dataclass(frozen=True)
class Named:
    """The one function that a request wants to be called."""

    name: str


def _read_choice(body: ChatBody) -> str | Named:
    """tool_choice. "none" leaves the tools out of the prompt: the model cannot call what it does not know."""
    choice = body.tool_choice
    if choice is None:
        return "auto"
    if choice in ("auto", "none", "required"):
        return str(choice)
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        message = f'tool_choice={choice!r} is none of auto, none, required, {{"type": "function", "function": {{...}}}}'
        raise bad_request(message, "tool_choice", "unsupported_value")
    return Named(function["name"])


def _forced_functions(choice: str | Named, offered: list[dict[str, Any]]) -> list[dict[str, Any]]:
    wanted = [function for function in offered if not isinstance(choice, Named) or function["name"] == choice.name]
    if not wanted:
        what = f"a function {choice.name!r}" if isinstance(choice, Named) else "a function"
        raise bad_request(f"tool_choice wants {what}, and tools have none", "tool_choice")
    return wanted
