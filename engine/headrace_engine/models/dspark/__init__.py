"""DSpark, the drafter of DeepSeek-V4-0731 and V4.1: a block of tokens in one pass of a few stages."""
