"""Estimates how long steps take."""
