"""The bytes of OpenAI answers: whole bodies, and the chunks of a stream with all their constant parts encoded once."""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec

from headrace_engine.chat.parse import CallPiece
from headrace_engine.core import RequestError, TokenScore
from headrace_engine.server.errors import error_object
from headrace_engine.server.generation import Delta, Usage
from headrace_engine.server.logprobs import chat_logprobs, completion_logprobs, num_chars, prompt_logprobs
from headrace_engine.server.tokenize import Tokenizer

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def usage_object(usages: list[Usage], num_choices: int = 1) -> dict[str, Any]:
    """Summed over prompts and their num_choices choices each; a prompt counts once.

    cached_tokens: found in prefill's prefix cache, never those received from a peer.
    """
    prompts = usages[::num_choices]
    prompt = sum(usage.num_prompt_tokens for usage in prompts)
    generated = sum(usage.num_generated for usage in usages)
    fields: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(usage.num_cached_tokens for usage in prompts)},
    }
    reasoning = [usage.num_reasoning_tokens for usage in usages if usage.num_reasoning_tokens is not None]
    if reasoning:
        fields["completion_tokens_details"] = {"reasoning_tokens": sum(reasoning)}
    return fields


class Format:
    """How one request's answers are written. `is_chat` chooses between the two OpenAI shapes."""

    def __init__(
        self,
        answer_id: str,
        model: str,
        tokenizer: Tokenizer,
        *,
        is_chat: bool,
        num_choices: int = 1,
        with_token_ids: bool = False,
        with_usage: bool = False,
        with_running_usage: bool = False,
        with_logprobs: bool = False,
        with_prompt_logprobs: bool = False,
        echoes: bool = False,
    ) -> None:
        """num_choices: of each prompt. echoes: the prompt comes before the answer (completions)."""
        self._tokenizer = tokenizer
        self._num_choices = num_choices
        self._with_logprobs = with_logprobs
        self._with_prompt_logprobs = with_prompt_logprobs
        self._echoes = echoes
        self._offsets: dict[int, int] = {}  # characters of each streamed choice so far, for logprobs
        self._is_chat = is_chat
        self._with_token_ids = with_token_ids
        self._with_usage = with_usage
        self._with_running_usage = with_running_usage
        self._id = ("chatcmpl-" if is_chat else "cmpl-") + answer_id
        self._model = model
        self._created = int(time.time())
        head = self._head("chat.completion.chunk" if is_chat else "text_completion")
        self._chunk_head = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._event_end = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    # --- streams ---

    def first_chunk(self, index: int, prompt_token_ids: list[int], prompt_scores: list[TokenScore]) -> bytes:
        """What comes before the first text of a choice; may be empty."""
        if self._is_chat:
            choice: dict[str, Any] = {
                "index": index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
        elif self._echoes or self._with_token_ids:
            text = self._tokenizer.decode(prompt_token_ids) if self._echoes else ""
            logprobs = None
            if self._echoes and self._with_logprobs:
                logprobs = completion_logprobs([None, *prompt_scores], prompt_token_ids, self._tokenizer, 0)
                self._offsets[index] = sum(num_chars(token, self._tokenizer) for token in prompt_token_ids)
            choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
        else:
            return b""
        if self._with_token_ids:
            choice["prompt_token_ids"] = prompt_token_ids
        return self._chunk_head + _encode(choice) + self._event_end

    def chunk(self, index: int, delta: Delta, usage: Usage) -> bytes:
        """One event with what a delta adds; empty if it shows nothing."""
        if self._is_chat and not self._with_token_ids and not delta.is_visible:
            return b""
        reason = b'"%b"' % delta.reason.encode() if delta.finish_reason is not None else b"null"
        token_ids = b',"token_ids":' + _encode(delta.token_ids) if self._with_token_ids else b""
        end = self._event_end
        if self._with_running_usage:
            end = b'],"usage":' + _encode(usage_object([usage])) + b"}\n\n"
        return b"".join(
            (
                self._chunk_head,
                b'{"index":%d' % index,
                b',"delta":' + self._chat_delta(delta) if self._is_chat else b',"text":' + _encode(delta.text),
                b',"logprobs":' + (self._logprobs(index, delta) if delta.scores else b"null"),
                token_ids,
                b',"finish_reason":',
                reason,
                b"}",
                end,
            )
        )

    def _chat_delta(self, delta: Delta) -> bytes:
        if not delta.reasoning and not delta.calls:
            return b'{"content":' + _encode(delta.text) + b"}"
        fields: dict[str, Any] = {}
        if delta.reasoning:
            fields["reasoning_content"] = delta.reasoning
        if delta.text:
            fields["content"] = delta.text
        if delta.calls:
            fields["tool_calls"] = [_call_delta(piece) for piece in delta.calls]
        return _encode(fields)

    def _logprobs(self, index: int, delta: Delta) -> bytes:
        if self._is_chat:
            return _encode(chat_logprobs(delta.scores, self._tokenizer))
        first = self._offsets.get(index, 0)
        token_ids = [score.token_id for score in delta.scores]
        self._offsets[index] = first + sum(num_chars(token, self._tokenizer) for token in token_ids)
        return _encode(completion_logprobs(delta.scores, token_ids, self._tokenizer, first))

    def last_chunks(self, usages: list[Usage]) -> bytes:
        """What ends a stream that went well."""
        if not self._with_usage:
            return DONE
        return self._chunk_head + b'],"usage":' + _encode(usage_object(usages, self._num_choices)) + b"}\n\n" + DONE

    def error_event(self, error: RequestError) -> bytes:
        """How a stream that has begun says that it cannot go on."""
        return b"data: " + _encode(self.error_object(error)) + b"\n\n"

    def error_object(self, error: RequestError) -> dict[str, Any]:
        return error_object(error)

    # --- whole answers ---

    def body(self, choices: list[Choice], usages: list[Usage]) -> bytes:
        answer = self._head("chat.completion" if self._is_chat else "text_completion")
        answer["choices"] = [self._choice(index, choice) for index, choice in enumerate(choices)]
        answer["usage"] = usage_object(usages, self._num_choices)
        if self._with_token_ids and self._is_chat:
            answer["prompt_token_ids"] = choices[0].prompt_token_ids
        if self._with_prompt_logprobs and self._is_chat:
            answer["prompt_logprobs"] = prompt_logprobs(choices[0].prompt_scores, self._tokenizer)
        return _encode(answer)

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        fields: dict[str, Any] = {"index": index}
        if self._is_chat:
            fields["message"] = _message(choice)
        else:
            fields["text"] = (self._tokenizer.decode(choice.prompt_token_ids) if self._echoes else "") + choice.text
        logprobs = self._choice_logprobs(choice) if self._with_logprobs else None
        fields |= {"logprobs": logprobs, "finish_reason": choice.finish_reason}
        if self._with_prompt_logprobs and not self._is_chat:
            fields["prompt_logprobs"] = prompt_logprobs(choice.prompt_scores, self._tokenizer)
        if self._with_token_ids:
            fields["token_ids"] = choice.token_ids
            if not self._is_chat:
                fields["prompt_token_ids"] = choice.prompt_token_ids
        return fields

    def _choice_logprobs(self, choice: Choice) -> dict[str, Any]:
        if self._is_chat:
            return chat_logprobs(choice.scores, self._tokenizer)
        scores: list[TokenScore | None] = list(choice.scores)
        token_ids = [score.token_id for score in choice.scores]
        if self._echoes:
            scores, token_ids = [None, *choice.prompt_scores, *scores], choice.prompt_token_ids + token_ids
        return completion_logprobs(scores, token_ids, self._tokenizer, 0)


class Choice(msgspec.Struct):
    """One finished answer. calls: name and arguments (JSON text)."""

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str
    reasoning: str = ""
    calls: list[tuple[str, str]] = []
    scores: list[TokenScore] = []
    prompt_scores: list[TokenScore] = []
    stop: str | None = None


class ChoiceBuilder:
    """Puts the deltas of one answer together."""

    def __init__(self, prompt_token_ids: list[int]) -> None:
        self._prompt_token_ids = prompt_token_ids
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._token_ids: list[int] = []
        self._calls: list[tuple[str, list[str]]] = []
        self._scores: list[TokenScore] = []
        self._prompt_scores: list[TokenScore] = []

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._reasoning.append(delta.reasoning)
        self._token_ids += delta.token_ids
        self._scores += delta.scores
        self._prompt_scores += delta.prompt_scores
        for piece in delta.calls:
            if piece.name is not None:
                self._calls.append((piece.name, []))
            self._calls[piece.index][1].append(piece.arguments)

    def finish(self, last: Delta) -> Choice:
        """last: the delta with the finish reason, added already."""
        calls = [(name, "".join(arguments)) for name, arguments in self._calls]
        reasoning = "".join(self._reasoning)
        text = "".join(self._texts)
        return Choice(
            text,
            self._token_ids,
            self._prompt_token_ids,
            last.reason,
            reasoning,
            calls,
            self._scores,
            self._prompt_scores,
            last.stop,
        )


def _message(choice: Choice) -> dict[str, Any]:
    """content is null if all there is is reasoning or calls."""
    has_more = bool(choice.reasoning or choice.calls)
    message: dict[str, Any] = {"role": "assistant", "content": None if has_more and not choice.text else choice.text}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.calls:
        message["tool_calls"] = [
            {"id": call_id(), "type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in choice.calls
        ]
    return message


def _call_delta(piece: CallPiece) -> dict[str, Any]:
    if piece.name is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": call_id(), "type": "function", "function": function}


def call_id() -> str:
    """A new one."""
    return f"call_{uuid.uuid4().hex[:24]}"


def event(name: str, data: bytes) -> bytes:
    """A server-sent event with a name; the data is one line."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)
