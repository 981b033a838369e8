"""Which models are loaded, where, and in how much memory."""
