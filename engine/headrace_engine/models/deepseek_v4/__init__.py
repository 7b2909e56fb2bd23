"""DeepSeek-V4: the complete text model, its checkpoints, and small random ones."""
