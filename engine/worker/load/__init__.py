"""From a model's name to weights in memory, or to the reason why it cannot be served."""
