"""A gRPC server library on h2 and Trio; README.md beside this file says how to use it."""
