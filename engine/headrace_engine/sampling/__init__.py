"""From logits to tokens: adjustments that requests ask for, grammars, random draws, log-probabilities."""
