"""OpenAI's API over HTTP: the same engine, limits and log as gRPC's, by another door."""
