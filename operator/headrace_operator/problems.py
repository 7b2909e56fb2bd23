"""What is wrong with a spec, in words. Pure; imports no client, so that command lines start at once."""

from __future__ import annotations

from pydantic import ValidationError

_MAX_PROBLEMS = 10  # told of one spec: a condition's message is bounded


def describe_problems(error: ValidationError) -> str:
    """What is wrong with a spec, each problem with its place in it."""
    problems = []
    for problem in error.errors(include_url=False, include_context=False, include_input=False):
        place = ".".join(str(part) for part in problem["loc"])
        problems.append(f"{place}: {problem['msg'].removeprefix('Value error, ')}")
    more = [f"and {len(problems) - _MAX_PROBLEMS} more"] if len(problems) > _MAX_PROBLEMS else []
    return "; ".join([*problems[:_MAX_PROBLEMS], *more])
