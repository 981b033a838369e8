"""What every kind of work shares: requests, events, credit, queue order and rates."""
