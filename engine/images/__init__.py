"""Images as input: a file's bytes become pixels of the size that a model reads."""
