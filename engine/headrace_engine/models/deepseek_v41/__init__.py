"""DeepSeek-V4.1: the text model, its checkpoints, and small random ones."""
