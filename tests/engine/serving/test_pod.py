"""What a pod gives its ranks."""

from __future__ import annotations

import pytest

from headrace_engine.pod import rank_environment


@pytest.mark.parametrize(
    ("own", "added"),
    [
        ({}, {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_NUM_THREADS": "2"}),
        ({"GOMP_SPINCOUNT": "1000"}, {"OMP_NUM_THREADS": "2"}),
        ({"OMP_NUM_THREADS": "7"}, {"OMP_WAIT_POLICY": "passive"}),
    ],
)
def test_threads_sleep_at_barriers_unless_the_user_wants_otherwise(own: dict[str, str], added: dict[str, str]) -> None:
    own = {"PATH": "/bin", **own}
    assert rank_environment(own, 2) == {**own, **added}
