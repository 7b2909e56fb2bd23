"""From an HTTP request to a checked job: token ids, sampling, how to answer. What can be refused is refused here."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec

from headrace_engine.chat.call_grammar import FORM
from headrace_engine.chat.formats import ChatFormat
from headrace_engine.chat.prompt import DSML, END_THINK
from headrace_engine.core import Leg, RequestError, SamplingParams, Ticket
from headrace_engine.kv.ticket import TicketError, ticket_from_json
from headrace_engine.sampling.grammar import of_grammar, with_named
from headrace_engine.server.asked import AnswerFormat, Asked
from headrace_engine.server.chat import ChatPlan, plan_chat
from headrace_engine.server.errors import ApiError, bad_request
from headrace_engine.server.prompts import PromptEncoder
from headrace_engine.server.sampling import (
    choice_of,
    num_choices_of,
    sampling_of,
    stops_of,
    too_long,
)
from headrace_engine.server.schema import (
    MAX_PROMPTS,
    ChatBody,
    CompletionBody,
    prompts_of,
)
from headrace_engine.server.structured import GrammarDoor
from headrace_engine.server.tokenize import Tokenizer

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions; a chat may use the whole context
LONG_TEXT = 16_384  # characters; more is tokenized in a thread


@dataclass(frozen=True)
class ModelCard:
    """What the door needs to know of the model."""

    name: str
    vocab_size: int
    max_model_len: int
    chat_format: ChatFormat
    image_token_id: int | None = None

    def check_name(self, name: str) -> None:
        """Raises ApiError (404) if a request is for another model."""
        if name != self.name:
            message = f"the model {name!r} does not exist here; this engine serves {self.name!r}"
            raise ApiError(RequestError(404, message, "not_found_error", "model_not_found", "model"))

    def check_ids(self, token_ids: list[int], param: str) -> None:
        """Raises ApiError (400) if they are no tokens of this model."""
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            raise bad_request(f"token ids must be in 0..{self.vocab_size - 1}", param)

    def check_text_only(self, token_ids: list[int], param: str) -> None:
        """Raises ApiError (400) if one of them stands for an image, given as an id or spelt out in a text."""
        if self.image_token_id is not None and self.image_token_id in token_ids:
            raise bad_request(f"token {self.image_token_id} stands for an image; only text is served", param)


@dataclass
class Job:
    """One HTTP request, checked. One prompt and one sampling for each choice; chat: None for completions.

    `num_choices` in a row are of one prompt. A prefill leg has the prompt of its ticket only.
    """

    label: str
    prompts: list[list[int]]
    samplings: list[SamplingParams]
    num_choices: int
    stops: tuple[str, ...]
    is_stream: bool
    format: AnswerFormat
    ticket: Ticket | None
    arrived_at: float  # on time.perf_counter's clock
    chat: ChatPlan | None = None

    @property
    def num_prompts(self) -> int:
        return len(self.prompts) // self.num_choices

    @property
    def scores_prompt(self) -> bool:
        """Then the engine that answers computes the prompt itself, whatever its role."""
        return self.samplings[0].num_prompt_logprobs is not None


async def read_job(
    asked: Asked,
    *,
    label: str,
    leg: Leg,
    card: ModelCard,
    encoder: PromptEncoder,
    grammars: GrammarDoor,
    arrived_at: float,
) -> Job:
    """Raises ApiError for whatever is wrong with the request."""
    body = asked.body
    card.check_name(body.model)
    ticket = _ticket(body, leg)
    stops = stops_of(body)
    is_stream = bool(body.stream)
    if body.stream_options is not None and not is_stream:
        raise bad_request("stream_options needs stream=true", "stream_options")
    chat: ChatPlan | None = None
    if isinstance(body, ChatBody):
        chat = plan_chat(body, card.chat_format)
        prompts = [await encode_chat(chat, encoder)]
    else:
        prompts = await _encode(_given(body, ticket), card, encoder.tokenizer)
    for prompt in prompts:
        card.check_text_only(prompt, "prompt" if chat is None else "messages")
    num_choices = num_choices_of(body)
    if len(prompts) * num_choices > MAX_PROMPTS:
        raise bad_request(f"at most {MAX_PROMPTS} choices in one request, for all prompts together", "n")
    grammar, grammar_after = await _grammar(body, leg, chat, encoder.tokenizer, grammars)
    samplings = [
        sampling_of(
            body,
            len(prompt),
            max_model_len=card.max_model_len,
            vocab_size=card.vocab_size,
            default_max_tokens=None if chat is not None else COMPLETION_MAX_TOKENS,
            grammar=grammar,
            grammar_after=grammar_after,
            thought_ends=_thought_ends(chat, encoder.tokenizer),
            leaves_room=chat is not None and chat.forced is not None,
        )
        for prompt in prompts
    ]
    return Job(
        label,
        [prompt for prompt in prompts for _ in range(num_choices)],
        [choice_of(sampling, index) for sampling in samplings for index in range(num_choices)],
        num_choices,
        stops,
        is_stream,
        asked.make_format(label, card.name, encoder.tokenizer),
        ticket,
        arrived_at,
        chat,
    )


async def _grammar(
    body: ChatBody | CompletionBody, leg: Leg, chat: ChatPlan | None, tokenizer: Tokenizer, grammars: GrammarDoor
) -> tuple[str | None, int | None]:
    """What the answer must follow, and the token behind which that begins. Prefill generates nothing: no grammar."""
    if leg is Leg.PREFILL:
        return None, None
    grammar = await grammars.grammar_of(body)
    if chat is None:
        return grammar, None
    end_of_thought = tokenizer.marker_id(END_THINK) if chat.is_thinking else None
    if chat.forced is not None:
        return await grammars.accept(of_grammar(chat.forced), "tools", body), end_of_thought
    if grammar is not None:
        if chat.beside_form is not None:
            either = with_named(chat.beside_form, FORM, grammar)
            grammar = await grammars.accept(either, "tools", body)
        return grammar, end_of_thought
    if chat.strict is not None:
        return await grammars.accept(of_grammar(chat.strict), "tools", body), None
    return None, None


def _thought_ends(chat: ChatPlan | None, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Calls may open within a thought: a marker in the middle of one would break it."""
    if chat is None or not chat.is_thinking:
        return ()
    markers = (END_THINK, DSML) if chat.tools is not None else (END_THINK,)
    return tuple(token for marker in markers if (token := tokenizer.marker_id(marker)) is not None)


def _ticket(body: ChatBody | CompletionBody, leg: Leg) -> Ticket | None:
    raw = body.headrace_ticket
    if leg is not Leg.PREFILL:
        if raw is not msgspec.UNSET:
            # JSON's last duplicate wins: a client could otherwise override the ticket that the router splices in.
            raise bad_request("headrace_ticket is not for clients", "headrace_ticket")
        return None
    if raw is msgspec.UNSET:
        raise bad_request("a prefill leg needs a ticket", "headrace_ticket")
    try:
        return ticket_from_json(raw)
    except TicketError as error:
        raise ApiError(error.error) from None


async def encode_chat(chat: ChatPlan, encoder: PromptEncoder) -> list[int]:
    if encoder.num_new_chars(chat.pieces) > LONG_TEXT:
        return await asyncio.to_thread(encoder.encode, chat.pieces)
    return encoder.encode(chat.pieces)


def _given(body: CompletionBody, ticket: Ticket | None) -> list[str | list[int]]:
    """All prompts, or the one that the ticket is for. Raises ApiError (400)."""
    given = prompts_of(body)
    if ticket is None:
        return given
    if not 0 <= ticket.prompt_index < len(given):
        raise bad_request(f"the ticket is for prompt {ticket.prompt_index} of {len(given)}", "headrace_ticket")
    return [given[ticket.prompt_index]]


async def _encode(given: list[str | list[int]], card: ModelCard, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of every prompt. Raises ApiError for empty or impossible ones."""
    if sum(len(prompt) for prompt in given if isinstance(prompt, str)) > LONG_TEXT:
        prompts = await asyncio.to_thread(_encode_texts, given, tokenizer)
    else:
        prompts = _encode_texts(given, tokenizer)
    for prompt, token_ids in zip(given, prompts, strict=True):
        if not isinstance(prompt, str):
            _check_ids(token_ids, card)
        if not token_ids:
            raise bad_request("the prompt is empty", "prompt")
    return prompts


def _encode_texts(prompts: list[str | list[int]], tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]


def _check_ids(token_ids: list[int], card: ModelCard) -> None:
    if len(token_ids) >= card.max_model_len:
        raise too_long(f"the prompt has {len(token_ids)} tokens", card.max_model_len)
    card.check_ids(token_ids, "prompt")
