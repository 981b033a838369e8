"""Parses a chat model's answers."""
