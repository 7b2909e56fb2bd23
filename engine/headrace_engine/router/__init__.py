"""`headrace-router`: the OpenAI endpoint in front of the prefill and decode groups. Knows HTTP, no tensors."""
