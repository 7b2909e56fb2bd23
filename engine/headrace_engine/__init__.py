"""The engine that the pods run: one MoE model, its KV cache, the transfers, the OpenAI surface, the router."""
