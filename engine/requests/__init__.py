"""The life of a request, from the values that a client sends to the last event of its stream."""
