"""The bytes of OpenAI answers: whole bodies, and the chunks of a stream with all their constant parts encoded once."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from headrace_engine.core import FinishReason
from headrace_engine.server.generation import Delta, Usage

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def usage_object(usages: list[Usage]) -> dict[str, Any]:
    """Summed over the choices. cached_tokens: found in prefill's prefix cache, never those received from a peer."""
    prompt = sum(usage.num_prompt_tokens for usage in usages)
    generated = sum(usage.num_generated for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(usage.num_cached_tokens for usage in usages)},
    }


class Format:
    """How one request's answers are written. `is_chat` chooses between the two OpenAI shapes."""

    def __init__(
        self,
        answer_id: str,
        model: str,
        *,
        is_chat: bool,
        with_token_ids: bool,
        with_usage: bool = False,
        with_running_usage: bool = False,
    ) -> None:
        self._is_chat = is_chat
        self._with_token_ids = with_token_ids
        self._with_usage = with_usage
        self._with_running_usage = with_running_usage
        self._id = ("chatcmpl-" if is_chat else "cmpl-") + answer_id
        self._model = model
        self._created = int(time.time())
        head = self._head("chat.completion.chunk" if is_chat else "text_completion")
        self._chunk_head = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._text_head = b',"delta":{"content":' if is_chat else b',"text":'
        self._text_tail = b'},"logprobs":null' if is_chat else b',"logprobs":null'
        self._event_end = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    # --- streams ---

    def first_chunk(self, index: int, prompt_token_ids: list[int]) -> bytes:
        """What comes before the first text of a choice; may be empty."""
        if self._is_chat:
            choice: dict[str, Any] = {
                "index": index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
        elif self._with_token_ids:
            choice = {"index": index, "text": "", "logprobs": None, "finish_reason": None}
        else:
            return b""
        if self._with_token_ids:
            choice["prompt_token_ids"] = prompt_token_ids
        return self._chunk_head + _encode(choice) + self._event_end

    def chunk(self, index: int, delta: Delta, usage: Usage) -> bytes:
        """One event with a delta's text."""
        reason = b'"%b"' % delta.finish_reason.value.encode() if delta.finish_reason is not None else b"null"
        token_ids = b',"token_ids":' + _encode(delta.token_ids) if self._with_token_ids else b""
        end = self._event_end
        if self._with_running_usage:
            end = b'],"usage":' + _encode(usage_object([usage])) + b"}\n\n"
        return b"".join(
            (
                self._chunk_head,
                b'{"index":%d' % index,
                self._text_head,
                _encode(delta.text),
                self._text_tail,
                token_ids,
                b',"finish_reason":',
                reason,
                b"}",
                end,
            )
        )

    def last_chunks(self, usages: list[Usage]) -> bytes:
        """What ends a stream that went well."""
        if not self._with_usage:
            return DONE
        return self._chunk_head + b'],"usage":' + _encode(usage_object(usages)) + b"}\n\n" + DONE

    # --- whole answers ---

    def body(self, choices: list[Choice], usages: list[Usage]) -> bytes:
        answer = self._head("chat.completion" if self._is_chat else "text_completion")
        answer["choices"] = [self._choice(index, choice) for index, choice in enumerate(choices)]
        answer["usage"] = usage_object(usages)
        if self._with_token_ids and self._is_chat:
            answer["prompt_token_ids"] = choices[0].prompt_token_ids
        return _encode(answer)

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        fields: dict[str, Any] = {"index": index}
        if self._is_chat:
            fields["message"] = {"role": "assistant", "content": choice.text}
        else:
            fields["text"] = choice.text
        fields |= {"logprobs": None, "finish_reason": choice.finish_reason.value}
        if self._with_token_ids:
            fields["token_ids"] = choice.token_ids
            if not self._is_chat:
                fields["prompt_token_ids"] = choice.prompt_token_ids
        return fields


class Choice(msgspec.Struct):
    """One finished answer."""

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: FinishReason


def event(name: str, data: bytes) -> bytes:
    """A server-sent event of the legs between router and engine; the data is one line."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


def error_event(error: dict[str, Any]) -> bytes:
    """How a stream that has begun says that it cannot go on."""
    return b"data: " + _encode(error) + b"\n\n"
