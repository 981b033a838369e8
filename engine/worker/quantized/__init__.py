"""Quantized weights: one form of 8 or 4 bits, and the formats that become it."""
