"""The core of encoders: which inputs the next step computes, and what its result means."""
