"""From a model's name to weights in memory, or to a refusal with the reason."""
