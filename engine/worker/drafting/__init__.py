"""Guesses a sequence's next tokens, so that one step can verify several (D27)."""
