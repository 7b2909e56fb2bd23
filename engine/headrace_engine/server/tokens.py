"""`/tokenize` and `/detokenize`, as vLLM has them: what a prompt is as token ids, and what token ids are as text."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from headrace_engine.server.chat import plan_chat
from headrace_engine.server.errors import bad_request
from headrace_engine.server.job import LONG_TEXT, ModelCard, encode_chat
from headrace_engine.server.prompts import PromptEncoder
from headrace_engine.server.schema import ChatBody, decode_body


class TokenizeBody(ChatBody, kw_only=True):
    """A text, or a chat with all that goes into its prompt."""

    model: str = ""
    messages: list[dict[str, Any]] = msgspec.field(default_factory=list)
    prompt: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(msgspec.Struct):
    tokens: list[int]
    model: str = ""


_tokenize_decoder = msgspec.json.Decoder(TokenizeBody)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeBody)


async def tokenize(raw: bytes, card: ModelCard, encoder: PromptEncoder) -> dict[str, Any]:
    """The answer's body. Raises ApiError (400, 404)."""
    body = decode_body(_tokenize_decoder, raw)
    card.check_name(body.model or card.name)
    tokenizer = encoder.tokenizer
    if body.prompt is not None:
        encode = tokenizer.encode if body.add_special_tokens else tokenizer.encode_plain
        if len(body.prompt) > LONG_TEXT:
            token_ids = await asyncio.to_thread(encode, body.prompt)
        else:
            token_ids = encode(body.prompt)
    elif body.messages:
        token_ids = await encode_chat(plan_chat(body, card.chat_format), encoder)
    else:
        raise bad_request("tokenize needs a prompt or messages", "prompt")
    names = [tokenizer.token_bytes(token_id).decode("utf-8", "replace") for token_id in token_ids]
    return {
        "count": len(token_ids),
        "max_model_len": card.max_model_len,
        "tokens": token_ids,
        "token_strs": names if body.return_token_strs else None,
    }


def detokenize(raw: bytes, card: ModelCard, encoder: PromptEncoder) -> dict[str, Any]:
    """The answer's body. Raises ApiError (400, 404)."""
    body = decode_body(_detokenize_decoder, raw)
    card.check_name(body.model or card.name)
    card.check_ids(body.tokens, "tokens")
    return {"prompt": encoder.tokenizer.decode(body.tokens)}
