"""What this process may use of the machine: memory and CPU time."""
