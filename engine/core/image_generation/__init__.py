"""The core of image models: which drawing takes the next step, and what its result means."""
