"""Models that read images: transformers' vision towers, and text models as everywhere."""
