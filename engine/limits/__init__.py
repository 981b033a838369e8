"""The limits of this process on the machine's memory and CPU time."""
