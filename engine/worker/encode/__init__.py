"""The worker of embedding models and cross-encoders."""
