"""The server process: engine, gRPC server, health, metrics and tracing, started and ended in
order."""
