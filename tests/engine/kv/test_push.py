"""Push: small stories of one ticket, and of writes that end in every order."""

from __future__ import annotations

import itertools

import pytest
from tests.engine.kv.tickets import make_ticket

from headrace_engine.kv.notices import Done, Failed
from headrace_engine.kv.push import Notify, Push, Write

BLOCK = 4


def make_push(num_tokens: int = 17, max_blocks_per_write: int = 64, **changes: object) -> Push:
    push = Push(make_ticket(num_tokens, BLOCK, **changes), BLOCK, max_blocks_per_write, accepted_at=0.0)
    push.lease_granted(asked_at=0.0)
    return push


def actions(push: Push, now: float = 0.0) -> list[Write | Notify]:
    found = []
    while (action := push.next_action(now)) is not None:
        found.append(action)
    return found


def test_a_chunk_is_written_as_soon_as_it_is_complete() -> None:
    push = make_push(block_ids=(30, 31, 32, 33))
    push.blocks_complete(0, [5, 6])
    assert actions(push) == [Write(1, (5, 6), (30, 31))]
    push.blocks_complete(2, [7])
    assert actions(push) == [Write(2, (7,), (32,))]


def test_the_last_write_carries_the_tail_the_state_and_done_but_waits_for_the_others() -> None:
    push = make_push(block_ids=(30, 31, 32, 33))
    push.blocks_complete(0, [5, 6])
    assert len(actions(push)) == 1
    push.blocks_complete(2, [7, 8])
    push.finish(local_slot=2, num_cached_tokens=8)
    assert actions(push) == []
    push.write_ended(1)
    assert actions(push) == [Write(2, (7, 8), (32, 33), (2, 3), Done("r-1", 1, 8))]
    push.write_ended(2)
    assert push.is_over
    assert push.error is None


def test_a_one_token_prompt_is_only_told() -> None:
    push = make_push(num_tokens=1)
    push.finish(local_slot=0, num_cached_tokens=0)
    assert actions(push) == [Notify(Done("r-1", 1, 0))]


def test_a_large_chunk_is_written_in_pieces() -> None:
    push = make_push(num_tokens=41, max_blocks_per_write=3)
    push.blocks_complete(0, list(range(8)))
    assert [len(action.local_blocks) for action in actions(push) if isinstance(action, Write)] == [3, 3, 2]


def test_no_write_starts_before_decode_has_granted_the_lease() -> None:
    push = Push(make_ticket(17, BLOCK, lease_seconds=5.0), BLOCK, 64, accepted_at=100.0)
    push.blocks_complete(0, [1, 2, 3, 4])
    push.finish(0, 0)
    assert actions(push, now=104.9) == []
    push.lease_granted(asked_at=100.0)
    assert [type(action) for action in actions(push, now=104.9)] == [Write]


def test_a_push_without_a_grant_ends_after_a_lease() -> None:
    push = Push(make_ticket(17, BLOCK, lease_seconds=5.0), BLOCK, 64, accepted_at=100.0)
    push.blocks_complete(0, [1, 2, 3, 4])
    push.finish(0, 0)
    assert actions(push, now=105.0) == [Notify(Failed("r-1", 1, "decode has not granted the lease for 5 s"))]


def test_a_lease_counts_from_when_it_was_asked_for_not_from_when_the_answer_came() -> None:
    push = make_push(lease_seconds=5.0)
    push.lease_granted(asked_at=3.0)
    push.lease_granted(asked_at=1.0)  # overtaken by a later one
    push.blocks_complete(0, [1])
    assert [type(action) for action in actions(push, now=7.9)] == [Write]
    push.blocks_complete(1, [2])
    assert actions(push, now=8.0) == []  # the first write is still running
    push.write_ended(1)
    assert actions(push, now=8.0) == [Notify(Failed("r-1", 1, "decode has not renewed the lease for 5 s"))]


def test_a_last_write_that_is_under_way_outlives_the_lease_and_a_late_cancel() -> None:
    push = make_push(lease_seconds=5.0)
    push.blocks_complete(0, [1, 2, 3, 4])
    push.finish(0, 0)
    assert len(actions(push, now=4.0)) == 1
    push.fail("the client left")
    assert actions(push, now=6.0) == []
    push.write_ended(1)
    assert push.is_over
    assert push.error is None


def test_a_failed_last_write_is_reported() -> None:
    push = make_push()
    push.blocks_complete(0, [1, 2, 3, 4])
    push.finish(0, 0)
    actions(push)
    push.write_ended(1, "broken")
    assert actions(push) == [Notify(Failed("r-1", 1, "broken", is_settled=False))]
    push.notified("the peer is gone")
    assert push.is_over
    assert push.error == "broken"


@pytest.mark.parametrize("order", list(itertools.permutations([1, 2, 3, 4])))
@pytest.mark.parametrize("failing", [(1,), (4,), (2, 3), (1, 2, 3, 4)])
def test_partial_failures_end_in_one_report_after_every_write(order: tuple[int, ...], failing: tuple[int, ...]) -> None:
    push = make_push(num_tokens=17)
    for index in range(4):
        push.blocks_complete(index, [index])
        assert len(actions(push)) == 1
    push.finish(0, 0)
    terminals = []
    for position, write_id in enumerate(order):
        push.write_ended(write_id, "broken" if write_id in failing else None)
        found = actions(push)
        assert not found or position == 3, "told before every write has ended"
        terminals += found
    assert terminals == [Notify(Failed("r-1", 1, "broken", is_settled=False))]


@pytest.mark.parametrize(("first_block", "count"), [(1, 1), (0, 5)])
def test_blocks_come_in_order_and_fit_the_ticket(first_block: int, count: int) -> None:
    with pytest.raises(ValueError, match=r"comes next|the ticket has"):
        make_push().blocks_complete(first_block, list(range(count)))


def test_finishing_needs_every_block() -> None:
    push = make_push()
    push.blocks_complete(0, [1])
    with pytest.raises(ValueError, match="1 of 4 blocks"):
        push.finish(0, 0)
