"""Turns text into token ids and back: tokenizers, detokenizers and chat templates."""
