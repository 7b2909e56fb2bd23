"""Looking into a body and splicing the ticket in."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_engine.router.body import BadBody, check_body, splice_ticket

TICKET = b'{"generation": 1}'
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.text().filter(lambda key: key not in ("headrace_ticket", "stream")), json_values, max_size=5),
    st.sampled_from([None, 1]),
    st.booleans(),
    st.sampled_from(["", " ", "\n\t "]),
)
def test_any_object_with_the_ticket_spliced_in_means_the_same_plus_the_ticket(fields, indent, ascii_only, space):
    body = (space + json.dumps(fields, indent=indent, ensure_ascii=ascii_only)).encode("utf-8", "surrogatepass")
    assert check_body(body) is False
    spliced = b"".join(splice_ticket(body, TICKET))
    assert json.loads(spliced) == {"headrace_ticket": {"generation": 1}, **fields}
    assert next(iter(json.loads(spliced))) == "headrace_ticket"


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"", "not a JSON object"),
        (b"{", "not a JSON object"),
        (b"[1]", "not a JSON object"),
        (b'"{}"', "not a JSON object"),
        (b'{"a": 1} {"headrace_ticket": 1}', "not a JSON object"),
        (b'{"a": NaN, "headrace_ticket": 1}', "not a JSON object"),
        (b"\xef\xbb\xbf{}", "not a JSON object"),
        ('{"a": 1}'.encode("utf-16"), "not a JSON object"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not a JSON object"),
        (b'{"headrace_ticket": null}', "the router's own field"),
        (b'{"a": 1, "headrace_ticket": {"generation": 9}}', "the router's own field"),
        (b'{"headrace\\u005fticket": {}}', "the router's own field"),
    ],
)
def test_bodies_refused_at_the_door(body, complaint):
    with pytest.raises(BadBody, match=complaint):
        check_body(body)


def test_a_ticket_key_deeper_down_is_the_clients_business():
    assert check_body(b'{"metadata": {"headrace_ticket": 1}, "prompt": "headrace_ticket"}') is False


@pytest.mark.parametrize(("value", "expected"), [("true", True), ("false", False), ("1", False), ("null", False)])
def test_whether_a_stream_is_asked_for(value, expected):
    assert check_body(f'{{"stream" : {value} }}'.encode()) is expected
