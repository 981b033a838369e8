"""The pure core: decides what a step computes, and what its result means.

Nothing here waits, reads a clock, draws a random number or imports torch, Trio or grpc.
"""
