"""The worker of text models."""
