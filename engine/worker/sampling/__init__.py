"""From logits to a token: edits, constraints, candidates and the draw."""
