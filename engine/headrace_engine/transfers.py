"""Between one rank's scheduler and its transfer agent: actions go there, events come back. No policy lives here."""

from __future__ import annotations

from headrace_engine.core import EngineRequest, RequestError, Ticket
from headrace_engine.kv.events import PushDone, PushFailed, TransferStats
from headrace_engine.kv.push import PushKey
from headrace_engine.kv.receive import Received, ReceiveFailed, ReceiveLost
from headrace_engine.kv.ticket import TicketError
from headrace_engine.kv.transfer import TransferAgent
from headrace_engine.messages import Failed, Pushed
from headrace_engine.scheduler import Scheduler
from headrace_engine.sequence import CancelPush, IssueTicket, PushBlocks, PushEnd, RevokeTicket


class Transfers:
    """The open pushes of a prefill rank and the tickets of a decode rank, by the names each side knows them by."""

    def __init__(self, agent: TransferAgent, scheduler: Scheduler) -> None:
        self._agent = agent
        self._scheduler = scheduler
        self._keys: dict[str, PushKey] = {}
        self._requests: dict[PushKey, str] = {}
        self._num_cached: dict[PushKey, int] = {}

    def open_push(self, request: EngineRequest) -> RequestError | None:
        """Accept a PREFILL leg's ticket, before it queues: its lease is kept from now on. The error, if refused."""
        ticket = request.ticket
        if ticket is None:
            return RequestError(400, "a prefill leg needs a ticket", param="headrace_ticket")
        try:
            key = self._agent.open_push(ticket, request.prompt_token_ids)
        except TicketError as error:
            return error.error
        self._keys[request.request_id] = key
        self._requests[key] = request.request_id
        self._num_cached[key] = 0
        return None

    def issue(self, action: IssueTicket) -> Ticket:
        sequence = action.sequence
        ticket = self._agent.issue_ticket(
            sequence.request_id,
            sequence.token_ids,
            action.num_held_tokens,
            sequence.block_ids,
            sequence.state_slot,
        )
        self._scheduler.ticket_issued(sequence, ticket.generation)
        return ticket

    def act(self, action: RevokeTicket | PushBlocks | PushEnd | CancelPush) -> None:
        if isinstance(action, RevokeTicket):
            self._agent.abandon(action.generation)
            return
        key = self._keys.get(action.request_id)
        if key is None:
            return  # the push has ended, and the scheduler is about to hear of it
        if isinstance(action, PushBlocks):
            self._agent.push_blocks(key, action.first, action.block_ids)
        elif isinstance(action, PushEnd):
            self._num_cached[key] = action.num_cached_tokens
            self._agent.finish_push(key, action.state_slot, action.num_cached_tokens)
        else:
            self._agent.cancel_push(key, action.reason)

    def refused(self, request_id: str) -> None:
        """The scheduler did not take a PREFILL leg whose ticket was accepted: decode must hear of it."""
        key = self._keys.get(request_id)
        if key is not None:
            self._agent.cancel_push(key, "the prefill engine has no room")

    def poll(self) -> list[Pushed | Failed]:
        """Hand the agent's events to the scheduler; returns what to tell the frontend."""
        messages: list[Pushed | Failed] = []
        for event in self._agent.poll_events():
            if isinstance(event, Received):
                self._scheduler.kv_arrived(event.generation, event.num_cached_tokens)
            elif isinstance(event, ReceiveFailed):
                self._scheduler.kv_failed(event.generation, event.error)
            elif isinstance(event, ReceiveLost):
                # The blocks go into quarantine, as those of any request that ends while its ticket is out.
                self._scheduler.abort(event.request_id)
                messages.append(_transfer_failed(event.request_id, f"the KV did not come: {event.error}"))
            else:
                messages.append(self._push_ended(event))
        return messages

    def stats(self) -> TransferStats:
        return self._agent.stats()

    def close(self) -> None:
        self._agent.close()

    def _push_ended(self, event: PushDone | PushFailed) -> Pushed | Failed:
        request_id = self._requests.pop(event.key)
        del self._keys[request_id]
        num_cached = self._num_cached.pop(event.key)
        self._scheduler.push_ended(request_id)
        if isinstance(event, PushDone):
            return Pushed(request_id, num_cached)
        return _transfer_failed(request_id, event.error)


def _transfer_failed(request_id: str, message: str) -> Failed:
    error = RequestError(503, message, "service_unavailable", "kv_transfer_failed", retriable=True)
    return Failed(request_id, error)
