"""Models that read images: transformers' vision towers beside our own decoder."""
