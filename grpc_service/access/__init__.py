"""Who may call what, how much at once, and what the log says about each call."""
