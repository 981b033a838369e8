"""Requests for text: their values, prompts and streams."""
