"""Processes of the server's own: how they start and end, and the channel to them."""
