"""Answers in the form of OpenAI's Responses API."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from headrace_engine.core import RequestError, TokenScore
from headrace_engine.server.answers import Choice, event
from headrace_engine.server.blocks import Added, Block, BlockStream, Closed, Opened, Step, blocks_of
from headrace_engine.server.errors import error_object
from headrace_engine.server.generation import Delta, Usage


class ResponsesFormat:
    """Implements asked.AnswerFormat. shown: the fields of the request that a response repeats."""

    def __init__(self, label: str, model: str, shown: dict[str, Any]) -> None:
        self._label = label
        self._model = model
        self._shown = shown
        self._created = int(time.time())
        self._stream = BlockStream()
        self._reason = ""
        self._num_events = 0

    # --- streams ---

    def first_chunk(self, index: int, prompt_token_ids: list[int], prompt_scores: list[TokenScore]) -> bytes:
        response = self._response("in_progress", [], None)
        return self._event("response.created", {"response": response}) + self._event(
            "response.in_progress", {"response": response}
        )

    def chunk(self, index: int, delta: Delta, usage: Usage) -> bytes:
        steps = self._stream.feed(delta)
        if delta.finish_reason is not None:
            steps += self._stream.finish()
            self._reason = delta.reason
        return b"".join(self._step_events(step) for step in steps)

    def last_chunks(self, usages: list[Usage]) -> bytes:
        status = _status(self._reason)
        output = [self._item(block, "completed") for block in self._stream.blocks]
        return self._event(f"response.{status}", {"response": self._response(status, output, usages[0])})

    def error_event(self, error: RequestError) -> bytes:
        fields = {"code": error.code, "message": error.message, "param": error.param}
        return self._event("error", {**fields, **self.error_object(error)})

    def error_object(self, error: RequestError) -> dict[str, Any]:
        return error_object(error)

    def _step_events(self, step: Step) -> bytes:
        block = step.block
        place = {"output_index": block.index, "item_id": self._item_id(block)}
        part = place if block.kind == "call" else {**place, "content_index": 0}
        if isinstance(step, Added):
            return self._event(f"{_PART_EVENTS[block.kind]}.delta", {**part, "delta": step.text, **_logprobs(block)})
        if isinstance(step, Opened):
            empty = Block(block.kind, block.index, "", block.name, block.call_id)
            item = {**self._item(empty, "in_progress"), **({} if block.kind == "call" else {"content": []})}
            events = self._event("response.output_item.added", {"output_index": block.index, "item": item})
            if block.kind == "text":
                events += self._event("response.content_part.added", {**part, "part": _text_part("")})
            return events
        return self._closing_events(step, part)

    def _closing_events(self, step: Closed, part: dict[str, Any]) -> bytes:
        block = step.block
        name = "arguments" if block.kind == "call" else "text"
        ended = {**part, name: block.text, **_logprobs(block)}
        if block.kind == "call":
            ended["name"] = block.name
        events = self._event(f"{_PART_EVENTS[block.kind]}.done", ended)
        if block.kind == "text":
            events += self._event("response.content_part.done", {**part, "part": _text_part(block.text)})
        item = self._item(block, "completed")
        return events + self._event("response.output_item.done", {"output_index": block.index, "item": item})

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        data = {"type": name, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event(name, msgspec.json.encode(data))

    # --- whole answers ---

    def body(self, choices: list[Choice], usages: list[Usage]) -> bytes:
        (choice,), (usage,) = choices, usages
        output = [self._item(block, "completed") for block in blocks_of(choice)]
        return msgspec.json.encode(self._response(_status(choice.finish_reason), output, usage))

    def _response(self, status: str, output: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        return {
            "id": f"resp_{self._label}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._model,
            "output": output,
            "usage": None if usage is None else _usage(usage),
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            **self._shown,
        }

    def _item_id(self, block: Block) -> str:
        return f"{_ID_PREFIXES[block.kind]}_{self._label}_{block.index}"

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        fields: dict[str, Any] = {"id": self._item_id(block), "status": status}
        if block.kind == "text":
            return {**fields, "type": "message", "role": "assistant", "content": [_text_part(block.text)]}
        if block.kind == "reasoning":
            content = [{"type": "reasoning_text", "text": block.text}]
            return {**fields, "type": "reasoning", "summary": [], "content": content}
        call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
        return {**fields, "type": "function_call", **call}


_ID_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
_PART_EVENTS = {
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
}


def _status(reason: str) -> str:
    return "incomplete" if reason == "length" else "completed"


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _logprobs(block: Block) -> dict[str, Any]:
    return {"logprobs": []} if block.kind == "text" else {}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        "output_tokens": usage.num_generated,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens or 0},
        "total_tokens": usage.num_prompt_tokens + usage.num_generated,
    }
