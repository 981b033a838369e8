"""Decides how many drafted tokens a step verifies (D27)."""
