"""Answers in the form of Anthropic's Messages API."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace_engine.core import RequestError, TokenScore
from headrace_engine.server.answers import Choice, event
from headrace_engine.server.blocks import Added, Block, BlockStream, Closed, Opened, Step, blocks_of
from headrace_engine.server.errors import anthropic_error_object
from headrace_engine.server.generation import Delta, Usage
from headrace_engine.server.tokenize import Tokenizer

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesFormat:
    """Implements asked.AnswerFormat."""

    def __init__(self, label: str, model: str, _: Tokenizer) -> None:
        self._id = f"msg_{label}"
        self._model = model
        self._stream = BlockStream()

    # --- streams ---

    def first_chunk(self, index: int, prompt_token_ids: list[int], prompt_scores: list[TokenScore]) -> bytes:
        usage = {"input_tokens": len(prompt_token_ids), "output_tokens": 0}
        return _event("message_start", {"message": self._message([], None, None, usage)})

    def chunk(self, index: int, delta: Delta, usage: Usage) -> bytes:
        steps = self._stream.feed(delta)
        if delta.finish_reason is None:
            return b"".join(map(_step_event, steps))
        steps += self._stream.finish()
        end = {"stop_reason": _stop_reason(delta.reason, delta.stop), "stop_sequence": delta.stop}
        return b"".join(map(_step_event, steps)) + _event("message_delta", {"delta": end, "usage": _usage(usage)})

    def last_chunks(self, usages: list[Usage]) -> bytes:
        return _event("message_stop", {})

    def error_event(self, error: RequestError) -> bytes:
        return event("error", msgspec.json.encode(self.error_object(error)))

    def error_object(self, error: RequestError) -> dict[str, Any]:
        return anthropic_error_object(error)

    # --- whole answers ---

    def body(self, choices: list[Choice], usages: list[Usage]) -> bytes:
        (choice,), (usage,) = choices, usages
        content = [_block(block) for block in blocks_of(choice)]
        reason = _stop_reason(choice.finish_reason, choice.stop)
        return msgspec.json.encode(self._message(content, reason, choice.stop, _usage(usage)))

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, stop: str | None, usage: dict[str, int]
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }


def _stop_reason(reason: str, stop: str | None) -> str:
    return "stop_sequence" if stop is not None and reason == "stop" else _STOP_REASONS.get(reason, "end_turn")


def _usage(usage: Usage) -> dict[str, int]:
    """input_tokens are those that were computed, as this API counts."""
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.num_generated,
    }


def _block(block: Block) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _arguments(block.text)}


def _arguments(text: str) -> dict[str, Any]:
    """A call's arguments as an object; those of a call that was cut off cannot be one."""
    try:
        arguments = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


def _step_event(step: Step) -> bytes:
    block = step.block
    if isinstance(step, Opened):
        empty = _block(Block(block.kind, block.index, "", block.name, block.call_id))
        return _event("content_block_start", {"index": block.index, "content_block": empty})
    if isinstance(step, Closed):
        return _event("content_block_stop", {"index": block.index})
    return _event("content_block_delta", {"index": block.index, "delta": _delta(step)})


def _delta(step: Added) -> dict[str, Any]:
    if step.block.kind == "text":
        return {"type": "text_delta", "text": step.text}
    if step.block.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": step.text}
    return {"type": "input_json_delta", "partial_json": step.text}


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return event(name, msgspec.json.encode({"type": name, **fields}))
