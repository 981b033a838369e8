"""Quantized weights: one form of 8 bits or fewer, and the formats that become it."""
