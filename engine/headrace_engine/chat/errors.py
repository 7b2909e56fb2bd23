"""What is wrong with a conversation, in the client's terms."""

from __future__ import annotations


class ChatError(ValueError):
    """A conversation that cannot become a prompt. `param` names the field, as OpenAI's errors do."""

    def __init__(self, message: str, param: str = "messages") -> None:
        super().__init__(message)
        self.param = param
