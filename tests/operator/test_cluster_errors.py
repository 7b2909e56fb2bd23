"""What an answer of the API server means: gone, refused for good, or worth another try."""

from __future__ import annotations

import pytest

from headrace_operator.cluster_errors import ClusterError, Exists, Gone, NamespaceGoing, Refused, WatchExpired, error_of


@pytest.mark.parametrize(
    ("status", "verb", "kind"),
    [
        (404, "get", Gone),
        (404, "delete", Gone),
        (404, "patch", Gone),
        (404, "apply", Refused),  # the namespace or the resource's definition is missing
        (409, "delete", Gone),  # another object has taken the name
        (409, "apply", ClusterError),
        (409, "create", Exists),
        (409, "update", ClusterError),
        (409, "patch", ClusterError),  # someone else has changed it
        (410, "watch", WatchExpired),
        (403, "apply", Refused),
        (422, "apply", Refused),
        (408, "list", ClusterError),
        (429, "apply", ClusterError),
        (500, "apply", ClusterError),
        (503, "get", ClusterError),
        (None, "get", ClusterError),
    ],
)
def test_each_answer_has_its_meaning(status: int | None, verb: str, kind: type[ClusterError]) -> None:
    assert type(error_of(status, None, "Reason", verb, "Pod demo")) is kind


@pytest.mark.parametrize(
    ("details", "kind"),
    [
        ('{"causes": [{"reason": "NamespaceTerminating", "field": "metadata.namespace"}]}', NamespaceGoing),
        ('{"causes": [{"reason": "FieldValueInvalid"}]}', Refused),
        ("{}", Refused),
        ("null", Refused),
    ],
)
def test_a_namespace_that_is_being_deleted_is_told_from_a_right_that_is_missing(
    details: str, kind: type[ClusterError]
) -> None:
    body = f'{{"message": "forbidden", "details": {details}}}'
    assert type(error_of(403, body, "Forbidden", "create", "Pod demo")) is kind


def test_the_servers_own_sentence_is_told_and_what_was_asked() -> None:
    assert str(error_of(403, '{"message": "exceeded quota"}', "Forbidden", "apply", "Pod demo")) == (
        "apply Pod demo: exceeded quota"
    )


@pytest.mark.parametrize("body", [None, "", "<html>", "[]", '{"code": 502}'])
def test_a_proxys_page_is_told_by_its_status(body: str | None) -> None:
    assert str(error_of(502, body, "Bad Gateway", "get", "Pod demo")) == "get Pod demo: 502 Bad Gateway"
