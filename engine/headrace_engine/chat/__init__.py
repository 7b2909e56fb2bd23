"""Chats: from messages to a prompt, and from an answer's text to reasoning, content and tool calls.

Text in, text out: nothing here knows tokens, sockets or tensors. `formats.py` has the prompts of each model family,
`parse.py` reads what the model writes back.
"""
