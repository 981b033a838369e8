"""Embed and Rerank requests: their values, inputs and streams."""
