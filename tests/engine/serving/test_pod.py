"""What a pod gives its ranks."""

from __future__ import annotations

import pytest

from headrace_engine.pod import rank_environment

DEFAULTS = {"OMP_NUM_THREADS": "2", "THP_MEM_ALLOC_ENABLE": "1"}


@pytest.mark.parametrize(
    ("own", "added"),
    [
        ({}, {**DEFAULTS, "OMP_WAIT_POLICY": "passive"}),
        ({"OMP_WAIT_POLICY": "active"}, DEFAULTS),
        ({"GOMP_SPINCOUNT": "1000"}, DEFAULTS),
        ({"OMP_NUM_THREADS": "7"}, {"THP_MEM_ALLOC_ENABLE": "1", "OMP_WAIT_POLICY": "passive"}),
    ],
)
def test_threads_sleep_at_barriers_and_tensors_get_huge_pages_unless_the_user_wants_otherwise(
    own: dict[str, str], added: dict[str, str]
) -> None:
    own = {"PATH": "/bin", **own}
    assert rank_environment(own, 2) == {**own, **added}
