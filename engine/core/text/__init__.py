"""The core of text generation: which tokens the next step computes, and what its result means."""
