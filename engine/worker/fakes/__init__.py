"""Runners without a model, for tests and for the simulator."""
