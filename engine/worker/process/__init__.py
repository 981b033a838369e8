"""A worker in a process of its own."""
