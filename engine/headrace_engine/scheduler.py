"""Which sequences compute how many tokens in the next step of one rank. Pure: no torch, no clock, no sockets.

* Continuous batching: each step takes one token of every generating sequence, then chunks of prompts, in the order of
  admission, until `max_batch_tokens` are used. While any sequence of the group generates, prompts get at most
  `max_mixed_tokens` of a step, so that a long prompt never stops the answers of others for long.
* Admission is first come, first served, and takes blocks for all tokens known so far, so that a prompt never stops half
  way for want of blocks. Generating sequences grow block by block; when none is left, the sequence admitted last gives
  up its blocks and recomputes later (it goes to the head of the queue).
* A DECODE leg is admitted without computing: its blocks go into a ticket, and it runs from its last prompt token once
  the KV has arrived. A PREFILL leg computes all prompt tokens but the last, never samples, and keeps its blocks until
  the transfer has ended.
* A DECODE leg may lead others with the same prompt (`n` answers of one request): when its KV has come, they get a copy
  of its state, and its full blocks are shared. Those without room then queue, and compute the prompt here.
* Prompts are cached by prefix where a block boundary is crossed; where the model keeps per-sequence state, chunks end
  at the last boundary of the prompt so that the state can be copied there (see `kv.prefix`).

Every call may queue actions (`take_actions`): what the rank must send, push or cancel, in this order.

One state machine in one file, longer than others here: each transition is right only beside the others.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from headrace_engine.core import (
    GRAMMAR_FAILED,
    NOT_FINITE,
    EngineRequest,
    FinishReason,
    Leg,
    RequestError,
    TokenScore,
)
from headrace_engine.holdings import Holdings
from headrace_engine.kv.blocks import BlockPool
from headrace_engine.kv.prefix import PrefixHit
from headrace_engine.sequence import (
    MAX_SCORED_PER_STEP,
    Action,
    CancelPush,
    Generated,
    Guide,
    IssueTicket,
    PushBlocks,
    PushEnd,
    Refused,
    RevokeTicket,
    Row,
    Sequence,
    Status,
    Step,
    StepOutput,
)

_WITHOUT_TOKEN = {
    NOT_FINITE: "the model's logits are not finite",
    GRAMMAR_FAILED: "the grammar allows no next token, or is too complex to tell which",
}


@dataclass(frozen=True)
class SchedulerLimits:
    max_batch_tokens: int  # tokens of one step
    max_mixed_tokens: int  # of which prompts may take so many while others generate
    max_sequences: int  # that hold blocks at the same time
    max_waiting: int  # requests that may queue for blocks
    max_model_len: int  # tokens of prompt and generation together
    eos_token_ids: frozenset[int]
    reserve_seconds: float = 30.0  # how long a DECODE leg may wait for blocks; a router waits longer for its ticket


class Scheduler:
    """The state machine of one rank's requests over one `BlockPool`."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool, *, has_snapshots: bool) -> None:
        """has_snapshots: as the pool's `needs_snapshots`: cached prefixes come with a copy of the state."""
        self.limits = limits
        self.pool = pool
        self.num_preemptions = 0
        self.prompt_tokens_total = 0
        self.generation_tokens_total = 0
        self._holdings = Holdings(pool, has_snapshots=has_snapshots)
        self._sequences: dict[str, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # in order of admission
        self._by_generation: dict[int, Sequence] = {}  # WAITING_FOR_KV, by ticket
        self._num_waiting_for_kv = 0
        self._num_pushing = 0
        self._actions: list[Action] = []
        self._num_scored = 0  # prompt tokens of the step that get a score

    # --- counts ------------------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def generates(self) -> bool:
        """Whether an answer is under way: a client waits for the next token of one whose first it has."""
        return any(sequence.num_generated and sequence.leg is not Leg.PREFILL for sequence in self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that requests here still have to have computed; what a prefix cache had is left out."""
        return sum(sequence.num_uncomputed for queue in (self._running, self._waiting) for sequence in queue)

    @property
    def num_waiting_for_kv(self) -> int:
        return self._num_waiting_for_kv

    @property
    def num_pushing(self) -> int:
        return self._num_pushing

    @property
    def _num_active(self) -> int:
        return len(self._running) + self._num_waiting_for_kv + self._num_pushing

    @property
    def is_empty(self) -> bool:
        """No request is left, in whatever state. Quarantined blocks do not count."""
        return not self._sequences

    def take_actions(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    # --- requests come and go ----------------------------------------------------------------------------------------

    def add(self, request: EngineRequest, now: float, guide: Guide | None = None) -> None:
        """Queue a request. A refusal is an action; nothing is reserved for it. guide: of a request with a grammar."""
        if request.request_id in self._sequences:
            self._refuse(request.request_id, RequestError(400, f"request id {request.request_id!r} is in use"))
            return
        if len(self._waiting) >= self.limits.max_waiting:
            # A router may try a leg on another group, and does so on 503; a whole request has only this engine.
            error = RequestError(
                429 if request.leg is Leg.WHOLE else 503,
                f"this engine has {len(self._waiting)} requests waiting already; retry later",
                "rate_limit_error",
                "overloaded",
                retriable=True,
            )
            self._refuse(request.request_id, error)
            return
        sequence = Sequence.of(request, now, guide)
        # Scores of a prompt come from computing it, and do not travel: without a ticket, as if it were preempted.
        sequence.was_admitted = request.leg is Leg.DECODE and sequence.sampling.num_prompt_logprobs is not None
        sequence.num_expected_cached = self._holdings.num_expected_cached(sequence)
        self._sequences[sequence.request_id] = sequence
        if request.shares_kv_of is None or sequence.was_admitted:
            self._waiting.append(sequence)
        else:
            self._follow(sequence, self._sequences.get(request.shares_kv_of))

    def abort(self, request_id: str) -> None:
        """The caller has lost interest. Idempotent; unknown ids are requests that have ended."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.is_cancelled:
            return
        self._end_early(sequence, "the request was cancelled")

    def ticket_issued(self, sequence: Sequence, generation: int) -> None:
        """The ticket that an IssueTicket action asked for; exactly one `kv_arrived` or `kv_failed` will follow."""
        sequence.generation = generation
        self._by_generation[generation] = sequence

    def kv_arrived(self, generation: int, num_cached_tokens: int) -> None:
        """Prefill has written everything this ticket asked for. Ends the quarantine of a request that has ended."""
        self.pool.end_quarantine(generation)
        sequence = self._by_generation.pop(generation, None)
        if sequence is None:
            return
        self._num_waiting_for_kv -= 1
        sequence.status = Status.RUNNING
        sequence.num_computed = sequence.num_prompt_tokens - 1
        sequence.num_cached_tokens = min(num_cached_tokens, sequence.num_prompt_tokens - 1)
        self._running.append(sequence)
        self.prompt_tokens_total += sequence.num_prompt_tokens
        self._holdings.cache_full_blocks(sequence)
        followers, sequence.followers = sequence.followers, []
        for follower in followers:
            self._part(follower)
        for follower in followers:
            self._share_kv(sequence, follower)

    def kv_failed(self, generation: int, reason: str) -> None:
        """No more writes will come for this ticket, and those that came are not a whole state."""
        self.pool.end_quarantine(generation)
        sequence = self._by_generation.pop(generation, None)
        if sequence is None:
            return
        self._num_waiting_for_kv -= 1
        self._refuse(sequence.request_id, _unavailable(f"the KV did not come: {reason}", "kv_transfer_failed"))
        self._release(sequence)

    def push_ended(self, request_id: str) -> None:
        """The transfer reads this PREFILL leg's blocks no more, whether it succeeded or not."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.leg is not Leg.PREFILL:
            return
        if sequence.status is Status.RUNNING:
            self._running.remove(sequence)
        elif sequence.status is Status.PUSHING:
            self._num_pushing -= 1
        else:
            self._waiting.remove(sequence)
        self._release(sequence)

    # --- a step ------------------------------------------------------------------------------------------------------

    def schedule(self, now: float, *, others_generate: bool = False) -> Step:
        """Choose the rows of the next step. `commit` must follow before the next call.

        others_generate: another rank's answers wait for this step to end as well.
        """
        self._expire(now)
        self._num_scored = 0
        rows: list[Row] = []
        budget = self.limits.max_batch_tokens
        prefilling: list[Sequence] = []
        for sequence in list(self._running):
            if sequence.num_target - sequence.num_computed > 1 or sequence.leg is Leg.PREFILL:
                prefilling.append(sequence)
            elif budget and sequence.status is Status.RUNNING and self._grow(sequence):
                rows.append(Row(sequence, 1, True))
                budget -= 1
        if rows or others_generate:
            budget = min(budget, self.limits.max_mixed_tokens)
        for sequence in prefilling:
            if budget and sequence.status is Status.RUNNING:
                budget -= self._add_chunk(rows, sequence, budget)
        self._admit(rows, budget)
        return Step(rows, self._holdings.take_slot_copies(), self._holdings.take_block_copies())

    def commit(self, step: Step, output: StepOutput) -> list[tuple[int, int]]:
        """The step has run. Returns state slots to copy at once, (from, to) in this order."""
        tokens = enumerate(output.token_ids)
        for index, row in enumerate(step.rows):
            sequence = row.sequence
            sequence.prompt_scores += output.prompt_scores.get(index, ())
            sequence.num_computed += row.num_tokens
            if row.num_tokens > 1 or sequence.num_generated == 0:
                self._holdings.cache_prompt_boundary(sequence)
            if sequence.leg is Leg.PREFILL:
                self.prompt_tokens_total += row.num_tokens
                self._push_computed(sequence)
            elif row.samples:
                place, token_id = next(tokens)
                self._take_token(sequence, token_id, output.scores.get(place))
        return self._holdings.take_slot_copies()

    # --- admission ---------------------------------------------------------------------------------------------------

    def _admit(self, rows: list[Row], budget: int) -> None:
        while self._waiting:
            head = self._waiting[0]
            num_active = self._num_active
            is_computing = head.leg is not Leg.DECODE or head.was_admitted
            has_room = num_active == 0 or num_active + len(head.followers) < self.limits.max_sequences
            if not has_room or (is_computing and budget <= 0):
                return
            hit = self._holdings.reserve(head)
            if hit is None:
                return
            self._waiting.popleft()
            is_first, head.was_admitted = not head.was_admitted, True
            if head.leg is Leg.DECODE and is_first:
                self._issue_ticket(head, hit)
                continue
            if is_first:
                head.num_cached_tokens = hit.num_tokens
                self.prompt_tokens_total += hit.num_tokens if head.leg is Leg.PREFILL else head.num_prompt_tokens
            head.status = Status.RUNNING
            self._running.append(head)
            if head.leg is Leg.PREFILL:
                self._push_computed(head)
            if head.status is Status.RUNNING:
                budget -= self._add_chunk(rows, head, budget)

    def _issue_ticket(self, sequence: Sequence, hit: PrefixHit) -> None:
        sequence.num_held_blocks = len(hit.block_ids)
        for each in (sequence, *sequence.followers):
            each.status = Status.WAITING_FOR_KV
            self._num_waiting_for_kv += 1
        self._actions.append(IssueTicket(sequence, hit.num_tokens))

    def _add_chunk(self, rows: list[Row], sequence: Sequence, budget: int) -> int:
        """Add the sequence's next tokens to the step; returns how many."""
        num_tokens = min(sequence.num_target - sequence.num_computed, budget)
        if sequence.scores_prompt:
            num_tokens = min(num_tokens, MAX_SCORED_PER_STEP - self._num_scored)
            self._num_scored += num_tokens
            if not num_tokens:
                return 0  # other prompts have used up this step's scores
        num_tokens = self._holdings.up_to_boundary(sequence, num_tokens)
        is_last = sequence.num_computed + num_tokens == sequence.num_target
        rows.append(Row(sequence, num_tokens, is_last and sequence.leg is not Leg.PREFILL))
        return num_tokens

    # --- several answers of one DECODE leg's KV ----------------------------------------------------------------------

    def _follow(self, sequence: Sequence, leader: Sequence | None) -> None:
        """Wait for the leader's KV; too late for that: compute the prompt here, like one that was preempted."""
        sequence.was_admitted = True  # it gets no ticket
        if leader is None or (leader.was_admitted and leader.status is not Status.WAITING_FOR_KV):
            self._waiting.append(sequence)
            return
        leader.followers.append(sequence)
        sequence.leader, sequence.status = leader, leader.status
        self._num_waiting_for_kv += leader.status is Status.WAITING_FOR_KV

    def _share_kv(self, leader: Sequence, follower: Sequence) -> None:
        """The leader's KV has come: the follower goes on from it, if there is room for one more."""
        if self._num_active >= self.limits.max_sequences or not self._holdings.share(leader, follower):
            follower.status = Status.WAITING
            self._waiting.append(follower)
            return
        follower.num_computed, follower.num_cached_tokens = leader.num_computed, leader.num_cached_tokens
        follower.status = Status.RUNNING
        self._running.append(follower)

    def _part(self, follower: Sequence) -> None:
        follower.leader = None
        self._num_waiting_for_kv -= follower.status is Status.WAITING_FOR_KV

    # --- growth and preemption ---------------------------------------------------------------------------------------

    def _grow(self, sequence: Sequence) -> bool:
        """Make sure of a block for the sequence's next token, at the cost of later ones. False: it lost its own."""
        while not self._holdings.grow(sequence):
            victim = next(other for other in reversed(self._running) if other.can_be_preempted)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence) -> None:
        self._running.remove(victim)
        self._holdings.free(victim)
        victim.num_computed = 0
        victim.status = Status.WAITING
        self._waiting.appendleft(victim)
        self.num_preemptions += 1

    # --- results -----------------------------------------------------------------------------------------------------

    def _take_token(self, sequence: Sequence, token_id: int, score: TokenScore | None) -> None:
        if token_id < 0:
            self._refuse(sequence.request_id, RequestError(500, _WITHOUT_TOKEN[token_id], "server_error"))
            self._running.remove(sequence)
            self._release(sequence)
            return
        sequence.token_ids.append(token_id)
        self.generation_tokens_total += 1
        reason: FinishReason | None = None
        sampling = sequence.sampling
        is_eos = token_id in self.limits.eos_token_ids and not sampling.ignore_eos
        if is_eos or token_id in sampling.stop_token_ids:
            reason = FinishReason.STOP
        elif sequence.num_generated >= sampling.max_tokens or len(sequence.token_ids) >= self.limits.max_model_len:
            reason = FinishReason.LENGTH
        prompt_scores = tuple(sequence.prompt_scores) if sequence.num_generated == 1 else ()
        self._actions.append(
            Generated(sequence.request_id, token_id, reason, sequence.num_cached_tokens, score, prompt_scores)
        )
        if reason is not None:
            self._running.remove(sequence)
            self._holdings.cache_full_blocks(sequence)
            self._release(sequence)

    def _push_computed(self, sequence: Sequence) -> None:
        """Hand the blocks that are final to the transfer, and the end of it when all tokens are computed."""
        is_complete = sequence.num_computed == sequence.num_target
        num_final = len(sequence.block_ids) if is_complete else sequence.num_computed // self.pool.block_size
        first = sequence.num_pushed_blocks
        if num_final > first:
            block_ids = tuple(sequence.block_ids[first:num_final])
            self._actions.append(PushBlocks(sequence.request_id, first, block_ids))
            sequence.num_pushed_blocks = num_final
        if is_complete:
            self._running.remove(sequence)
            sequence.status = Status.PUSHING
            self._num_pushing += 1
            self._actions.append(PushEnd(sequence.request_id, sequence.state_slot, sequence.num_cached_tokens))

    # --- ends --------------------------------------------------------------------------------------------------------

    def _expire(self, now: float) -> None:
        """A burst should queue; but a clear error is better than a place in a queue that does not move."""
        late: list[Sequence] = []
        for sequence in self._waiting:  # the preempted, then the others in order of arrival
            if sequence.leg is not Leg.DECODE:
                break  # an engine of another role: nothing expires
            if sequence.was_admitted:
                continue
            if now - sequence.arrival_seconds < self.limits.reserve_seconds:
                break
            late.append(sequence)
        for sequence in late:
            message = f"no cache space became free within {self.limits.reserve_seconds:g} s"
            self._refuse(sequence.request_id, _unavailable(message, "overloaded"))
            self._end_early(sequence, message)

    def _end_early(self, sequence: Sequence, reason: str) -> None:
        if sequence.leg is Leg.PREFILL:
            # The ticket was accepted: the peer must hear of the end, and writes under way still read the blocks.
            sequence.is_cancelled = True
            if sequence.status is not Status.PUSHING:
                (self._running if sequence.status is Status.RUNNING else self._waiting).remove(sequence)
                sequence.status = Status.PUSHING
                self._num_pushing += 1
            self._actions.append(CancelPush(sequence.request_id, reason))
            return
        if sequence.leader is not None:
            sequence.leader.followers.remove(sequence)
            self._part(sequence)
        elif sequence.status is Status.WAITING_FOR_KV:
            self._quarantine(sequence)
        elif sequence.status is Status.RUNNING:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self._release(sequence)

    def _quarantine(self, sequence: Sequence) -> None:
        """The ticket is out: prefill may write into what it names until it says otherwise."""
        del self._by_generation[sequence.generation]
        self._num_waiting_for_kv -= 1
        self._holdings.quarantine(sequence)
        self._actions.append(RevokeTicket(sequence.generation))

    def _release(self, sequence: Sequence) -> None:
        self._holdings.free(sequence)
        sequence.status = Status.ENDED
        del self._sequences[sequence.request_id]
        for follower in sequence.followers:
            self._part(follower)
            message = "the KV did not come: the answer that it was for has ended"
            self._refuse(follower.request_id, _unavailable(message, "kv_transfer_failed"))
            self._release(follower)

    def _refuse(self, request_id: str, error: RequestError) -> None:
        self._actions.append(Refused(request_id, error))


def _unavailable(message: str, code: str) -> RequestError:
    return RequestError(503, message, "service_unavailable", code, retriable=True)
