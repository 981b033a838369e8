"""Describes models that run compiled, by their config alone and without transformers (D11)."""
