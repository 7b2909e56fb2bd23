"""One rank's process: its loop from messages to scheduler to forward to messages.

    1. take what the frontend sent      (without waiting if there is work)
    2. take the transfer's events
    3. let the scheduler choose rows    -> slot copies, then tickets, pushes, refusals
    4. agree with the group             (expert-parallel groups only: run if anyone has work)
    5. forward and sampling, commit     -> tokens, pushes
    6. one message with all that this step has to say

The rank ends, and with it its pod, when anything is not as it should be: a lost leader, a lost peer, a dead transfer
thread, an exception in the forward. One owner of restarts (the operator) then replaces the group as a whole.
"""

from __future__ import annotations

import logging
import time

import msgspec

from headrace_engine.control import ControlClient
from headrace_engine.core import Leg, RequestError
from headrace_engine.grammars import PendingGrammars
from headrace_engine.group import StepGroup
from headrace_engine.messages import (
    Abort,
    Add,
    Batch,
    Failed,
    Pushed,
    RankState,
    Shutdown,
    TicketReady,
    Tokens,
    ToRank,
    Welcome,
)
from headrace_engine.runner import Runner
from headrace_engine.scheduler import Scheduler
from headrace_engine.sequence import (
    CancelPush,
    Generated,
    IssueTicket,
    PushBlocks,
    PushEnd,
    Refused,
    RevokeTicket,
    Step,
    StepOutput,
)
from headrace_engine.transfers import Transfers

STATE_SECONDS = 0.1  # between reports of the rank's load
IDLE_SECONDS = 1.0
WAITING_SECONDS = 0.1  # between looks while requests wait for blocks or KV

log = logging.getLogger(__name__)

Item = TicketReady | Tokens | Pushed | Failed


class RankLoop:
    """Owns the rank's scheduler, runner and connections; `run` returns after a Shutdown."""

    def __init__(
        self,
        rank: int,
        control: ControlClient,
        scheduler: Scheduler,
        runner: Runner,
        transfers: Transfers | None,
        group: StepGroup | None,
        grammars: PendingGrammars,
    ) -> None:
        self._rank = rank
        self._control = control
        self._scheduler = scheduler
        self._runner = runner
        self._transfers = transfers
        self._group = group
        self._grammars = grammars
        self._items: list[Item] = []
        self._num_steps = 0
        self._computed_prompt_tokens = 0
        self._prompt_seconds = 0.0
        self._is_leaving = False
        self._was_woken = False
        self._group_generates = False
        self._idle_wait_seconds = 0.0
        self._last_state: RankState | None = None
        self._last_state_at = 0.0

    def run(self) -> None:
        """Until the frontend says Shutdown and every request has ended. Raises on anything that must end the pod."""
        while not self._turn():
            pass
        self._report(force=True)

    def _turn(self) -> bool:
        """One turn of the loop; True when it is time to leave."""
        self._take_messages()
        if self._transfers is not None:
            self._items += self._transfers.poll()
        now = time.monotonic()
        self._add_guided(now)
        step = self._scheduler.schedule(now, others_generate=self._group_generates)
        self._runner.copy_slots(step.slot_copies)
        self._runner.copy_blocks(step.block_copies)
        self._act()
        must_run, may_leave = self._agree(bool(step.rows))
        if must_run:
            output = self._run(step)
            self._runner.copy_slots(self._scheduler.commit(step, output))
            self._act()
        self._send_items()
        self._report()
        if not must_run and not self._idle_wait_seconds:
            self._idle_wait_seconds = IDLE_SECONDS
        return may_leave

    def _run(self, step: Step) -> StepOutput:
        """The forward, counted."""
        num_prompt_tokens = step.num_prompt_tokens
        started = time.perf_counter()
        output = self._runner.run(step.rows)
        self._num_steps += 1
        if num_prompt_tokens:
            self._computed_prompt_tokens += num_prompt_tokens
            self._prompt_seconds += time.perf_counter() - started
        return output

    def _agree(self, has_work: bool) -> tuple[bool, bool]:
        """Whether to run a forward now, and whether to leave. A collective if the group steps together."""
        wants_to_leave = self._is_leaving and self._is_empty
        self._idle_wait_seconds = 0.0
        if self._group is None:
            return has_work, wants_to_leave
        # A rank that waits for KV keeps the whole group attentive: its work can start at any moment.
        agreement = self._group.agree(
            has_work=has_work,
            was_woken=self._was_woken or not self._is_empty,
            wants_to_leave=wants_to_leave,
            generates=self._scheduler.generates,
        )
        self._was_woken = False
        self._group_generates = agreement.any_generates
        if not agreement.must_run:
            self._idle_wait_seconds = agreement.idle_wait_seconds
        return agreement.must_run, agreement.may_leave

    @property
    def _is_empty(self) -> bool:
        return self._scheduler.is_empty and self._grammars.is_empty

    # --- in ---

    def _take_messages(self) -> None:
        wait = self._idle_wait_seconds
        if wait:
            if not self._is_empty or self._state() != self._last_state:
                wait = min(wait, WAITING_SECONDS)
            self._control.wait(wait)
        for message in self._control.receive():
            # A Welcome is only the leader's beat. It must not hide the Wake that came with it.
            self._was_woken |= not isinstance(message, Welcome)
            self._handle(message)

    def _handle(self, message: ToRank) -> None:
        if isinstance(message, Add):
            self._add(message)
        elif isinstance(message, Abort):
            if not self._grammars.abort(message.request_id):
                self._scheduler.abort(message.request_id)
        elif isinstance(message, Shutdown):
            self._is_leaving = True

    def _add(self, message: Add) -> None:
        request = message.request
        if request.leg is not Leg.WHOLE:
            assert self._transfers is not None, f"a {request.leg} leg on a unified engine"
        if request.leg is Leg.PREFILL and self._transfers is not None:
            error = self._transfers.open_push(request)
            if error is not None:
                self._items.append(Failed(request.request_id, error))
                return
        if request.leg is not Leg.DECODE:  # which computes a prompt's last token only
            self._runner.expect(request.prompt_token_ids)
        if request.sampling.grammar is not None:
            self._grammars.add(request, time.monotonic())
        else:
            self._scheduler.add(request, time.monotonic())

    def _add_guided(self, now: float) -> None:
        """Requests whose grammar is ready."""
        if self._grammars.is_empty:
            return
        for request, guide in self._grammars.poll(now):
            if isinstance(guide, RequestError):
                self._items.append(Failed(request.request_id, guide))
            else:
                self._scheduler.add(request, now, guide)

    # --- out ---

    def _act(self) -> None:
        for action in self._scheduler.take_actions():
            if isinstance(action, Generated):
                self._items.append(_tokens(action))
            elif isinstance(action, Refused):
                self._items.append(Failed(action.request_id, action.error))
                if self._transfers is not None:
                    self._transfers.refused(action.request_id)
            elif isinstance(action, IssueTicket):
                assert self._transfers is not None
                self._items.append(TicketReady(action.sequence.request_id, self._transfers.issue(action)))
            elif isinstance(action, RevokeTicket | PushBlocks | PushEnd | CancelPush):
                assert self._transfers is not None
                self._transfers.act(action)

    def _send_items(self) -> None:
        if self._items:
            self._control.send(Batch(self._items))
            self._items = []

    def _report(self, force: bool = False) -> None:
        now = time.monotonic()
        if now - self._last_state_at < STATE_SECONDS and not force:
            return
        state = self._state()
        if state != self._last_state or force:
            self._control.send(state)
            self._last_state = state
            self._last_state_at = now

    def _state(self) -> RankState:
        scheduler = self._scheduler
        state = RankState(
            rank=self._rank,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_waiting_for_kv=scheduler.num_waiting_for_kv,
            num_pushing=scheduler.num_pushing,
            num_free_blocks=scheduler.pool.num_free_blocks,
            num_quarantined_blocks=scheduler.pool.num_quarantined_blocks,
            num_preemptions=scheduler.num_preemptions,
            num_steps=self._num_steps,
            prompt_tokens_total=scheduler.prompt_tokens_total,
            generation_tokens_total=scheduler.generation_tokens_total,
            num_queued_tokens=scheduler.num_queued_tokens,
            computed_prompt_tokens_total=self._computed_prompt_tokens,
            prompt_seconds_total=round(self._prompt_seconds, 3),
        )
        if self._transfers is None:
            return state
        stats = self._transfers.stats()
        return msgspec.structs.replace(
            state,
            num_peers=stats.num_peers,
            kv_bytes_pushed_total=stats.pushed_bytes_total,
            kv_push_seconds_total=stats.push_seconds_total,
            num_pushes_total=stats.num_pushes_total,
            num_push_failures_total=stats.num_push_failures_total,
            num_receives_total=stats.num_receives_total,
            num_receive_failures_total=stats.num_receive_failures_total,
            num_stale_notices_total=stats.num_stale_notices_total,
            oldest_transfer_age_seconds=round(stats.oldest_age_seconds, 1),
        )


def _tokens(action: Generated) -> Tokens:
    scores = [] if action.score is None else [action.score]
    return Tokens(
        action.request_id,
        [action.token_id],
        action.finish_reason,
        action.num_cached_tokens,
        scores,
        list(action.prompt_scores),
    )
