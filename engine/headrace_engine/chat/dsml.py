"""DSML, the markup of tools: how calls are written in an answer, and how tools are told to the model.

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="F">
    <｜DSML｜parameter name="K" string="true|false">V</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

Each element is on a line of its own. string="true": V is the text itself; "false": V is JSON. Nothing is escaped.
V4.1 writes a space behind the marker, and `calls` for `tool_calls`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace_engine.chat.prompt import DSML, Prompt
from headrace_engine.chat.texts import tools_section

GAP = "\n\n"  # between an answer's text and its calls


@dataclass(frozen=True)
class ToolCall:
    """A call in the history. id: "" if the client gave none; arguments: JSON text, as the client sent it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Dialect:
    """Names of the three tags, without the marker."""

    calls: str
    invoke: str
    parameter: str

    def write_tools(self, prompt: Prompt, functions: Iterable[dict[str, Any]]) -> None:
        """The section that tells the model of its tools. functions: as in OpenAI's `tools[].function`."""
        before, after = tools_section(DSML + self.calls, DSML + self.invoke, DSML + self.parameter)
        prompt.own(before)
        prompt.text("\n".join(map(to_json, functions)))
        prompt.own(after)

    def write_calls(self, prompt: Prompt, calls: Sequence[ToolCall]) -> None:
        """A block of calls, as the model writes it behind its answer."""
        prompt.text(GAP)
        self._open(prompt, self.calls)
        prompt.text(">\n")
        for call in calls:
            self._open(prompt, self.invoke)
            prompt.text(f' name="{call.name}">\n')
            for index, (key, value) in enumerate(read_arguments(call.arguments).items()):
                prompt.text("\n" if index else "")
                self._write_parameter(prompt, key, value)
            prompt.text("\n")
            self._close(prompt, self.invoke)
            prompt.text("\n")
        self._close(prompt, self.calls)

    def _write_parameter(self, prompt: Prompt, key: str, value: Any) -> None:
        is_text = isinstance(value, str)
        self._open(prompt, self.parameter)
        prompt.text(f' name="{key}" string="{"true" if is_text else "false"}">')
        prompt.text(value if is_text else to_json(value))
        self._close(prompt, self.parameter)

    def _open(self, prompt: Prompt, tag: str) -> None:
        prompt.text("<")
        prompt.marker(DSML)
        prompt.text(tag)

    def _close(self, prompt: Prompt, tag: str) -> None:
        prompt.text("</")
        prompt.marker(DSML)
        prompt.text(tag + ">")


V4_DIALECT = Dialect(calls="tool_calls", invoke="invoke", parameter="parameter")
V41_DIALECT = Dialect(calls=" calls", invoke=" invoke", parameter=" parameter")


def read_arguments(text: str) -> dict[str, Any]:
    """A call's arguments by name. What is no JSON object (a call that was cut off, say) is one argument of that name.

    JSON within JSON is read too: some clients encode arguments twice.
    """
    value: Any = text
    for _ in range(2):
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                break
    return value if isinstance(value, dict) else {"arguments": text}


def to_json(value: Any) -> str:
    """JSON as the model was trained on it: one line, a space behind each colon and comma, letters unescaped."""
    return json.dumps(value, ensure_ascii=False)
