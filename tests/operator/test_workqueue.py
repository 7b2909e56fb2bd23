"""The queue: one pass per key at a time, retries with backoff, no lost wake-ups."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from headrace_operator.workqueue import ExpectedError, Key, WorkQueue

A, B = Key("default", "a"), Key("default", "b")


@contextlib.asynccontextmanager
async def working(
    queue: WorkQueue,
    reconcile: Callable[[Key], Awaitable[float | None]],
    rest_seconds: Callable[[Key], float | None] = lambda key: None,
) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(queue.work(reconcile, rest_seconds)) for _ in range(3)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        queue.close()


async def test_many_events_of_a_key_are_one_pass() -> None:
    queue, passes = WorkQueue(), []

    async def reconcile(key: Key) -> None:
        passes.append(key)

    for _ in range(10):
        queue.add(A)
    queue.add(B)
    async with working(queue, reconcile):
        await asyncio.sleep(0.05)
    assert passes == [A, B]


async def test_a_key_that_rests_is_left_alone_and_keeps_nobody_waiting() -> None:
    queue, passes = WorkQueue(), []
    rests: dict[Key, list[float | None]] = {A: [0.05, None], B: [None]}

    async def reconcile(key: Key) -> None:
        passes.append(key)

    async with working(queue, reconcile, lambda key: rests[key].pop(0)):
        queue.add(A)
        queue.add(B)
        await asyncio.sleep(0.02)
        assert passes == [B]
        await asyncio.sleep(0.2)
    assert passes == [B, A]


async def test_a_key_is_worked_on_once_at_a_time_and_again_if_it_changed_meanwhile() -> None:
    queue, running, most, passes = WorkQueue(), 0, 0, 0
    go_on = asyncio.Event()

    async def reconcile(key: Key) -> None:
        nonlocal running, most, passes
        running, passes = running + 1, passes + 1
        most = max(most, running)
        await go_on.wait()
        running -= 1

    async with working(queue, reconcile):
        for _ in range(5):
            queue.add(A)
            await asyncio.sleep(0.005)
        go_on.set()
        await asyncio.sleep(0.05)
    assert most == 1
    assert passes == 2


async def test_other_keys_do_not_wait_for_a_slow_one() -> None:
    queue, done = WorkQueue(), []

    async def reconcile(key: Key) -> None:
        await asyncio.sleep(1 if key == A else 0)
        done.append(key)

    queue.add(A)
    queue.add(B)
    async with working(queue, reconcile):
        await asyncio.sleep(0.05)
    assert done == [B]


async def test_a_failed_pass_is_tried_again() -> None:
    queue, passes = WorkQueue(), 0

    async def reconcile(key: Key) -> None:
        nonlocal passes
        passes += 1
        if passes == 1:
            raise ExpectedError("away")

    queue.add(A)
    async with working(queue, reconcile):
        await asyncio.sleep(0.05)
        assert passes == 1
        await asyncio.sleep(0.7)
    assert passes == 2


async def test_a_pass_may_ask_to_be_run_again_later_and_an_event_comes_first() -> None:
    queue, times = WorkQueue(), []
    loop = asyncio.get_running_loop()

    async def reconcile(key: Key) -> float | None:
        times.append(loop.time())
        return 0.1 if len(times) < 3 else None

    queue.add(A)
    async with working(queue, reconcile):
        await asyncio.sleep(0.02)
        queue.add(A)
        await asyncio.sleep(0.2)
    assert len(times) == 3
    assert times[2] - times[1] >= 0.09
