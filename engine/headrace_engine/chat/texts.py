"""The fixed English texts of the DeepSeek-V4 and V4.1 prompt formats. The models know them letter by letter."""

from __future__ import annotations

from headrace_engine.chat.prompt import END_THINK, THINK

# The effort of V4, in words; it comes right behind the beginning-of-sentence token.
V4_EFFORTS = {
    "low": "",
    "high": (
        "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
        "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root "
        "cause, rigorously stress-testing your logic against all potential paths, edge cases, and adversarial "
        "scenarios.\n"
        "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
        "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
    ),
    "max": (
        "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
        "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively "
        "decompose the problem into its most fundamental components, trace every causal chain to its root, and "
        "resolve the underlying cause rather than any surface symptom.\n"
        "Do not stop reasoning until you have independently verified the solution from multiple angles and are "
        "certain that no assumption remains unchecked and no error remains undiscovered.\n\n"
    ),
}


def v41_effort(budget: int) -> str:
    """The effort of V4.1, a number of 1 to 100."""
    scale = "(range 1-100, the higher the value, the more thorough the reasoning)"
    return f"Reasoning Effort: {budget} {scale}\n\n"


# The answer's JSON schema follows.
RESPONSE_FORMAT = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"


def tools_section(calls: str, invoke: str, parameter: str) -> tuple[str, str]:
    """What comes before and after the tools' schemas. calls, invoke, parameter: tag names, with their marker."""
    before = f"""

## Tools

You have access to a set of tools to help answer the user's question. \
You can invoke tools by writing a "<{calls}>" block like the following:

<{calls}>
<{invoke} name="$TOOL_NAME">
<{parameter} name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{parameter}>
...
</{invoke}>
<{invoke} name="$TOOL_NAME2">
...
</{invoke}>
</{calls}>

String parameters should be specified as is and set `string="true"`. \
For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), \
you MUST output your complete reasoning inside {THINK}...{END_THINK} BEFORE any tool calls or final response.

Otherwise, output directly after {END_THINK} with tool calls or final response.

### Available Tool Schemas

"""
    after = """

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
    return before, after
