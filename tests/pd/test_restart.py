"""A partner that is replaced at the same address: what the other remembers of its former life must not matter."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest
from tests.pd.engines import BLOCK, Engine, pd_tokens, prompts_of, running
from tests.pd.reference import Reference

pytestmark = pytest.mark.slow


def replaced(engine: Engine, role: str) -> Engine:
    """Another process at the same ports; the first one dies without a word to anyone."""
    for pid in (*engine.rank_pids(), engine.process.pid):
        os.kill(pid, signal.SIGKILL)
    engine.process.wait(20)
    return Engine("--role", role, port=engine.port, control=engine.control, store=engine.store)


def test_a_partner_that_was_replaced_works_from_its_first_request_on(reference: Reference) -> None:
    pair = {name: Engine("--role", name) for name in ("prefill", "decode")}
    prompts = prompts_of([3 * BLOCK + 1, 3 * BLOCK + 2, 2 * BLOCK], first=130)
    with contextlib.ExitStack() as stack:
        stack.enter_context(running(*pair.values()))
        assert pd_tokens(pair["prefill"].url, pair["decode"].url, prompts[0]) == reference.tokens(prompts[0], 8)
        for role in ("decode", "prefill"):
            former = {rank["incarnation"] for rank in pair[role].state()["ranks"]}
            pair[role] = replaced(pair[role], role)
            stack.enter_context(running(pair[role]))
            assert not former & {rank["incarnation"] for rank in pair[role].state()["ranks"]}
            # The first prompt is asked again: what prefill has cached must not be taken for what decode has.
            for prompt in prompts:
                assert pd_tokens(pair["prefill"].url, pair["decode"].url, prompt) == reference.tokens(prompt, 8)
            for engine in pair.values():
                engine.wait_all_free()
