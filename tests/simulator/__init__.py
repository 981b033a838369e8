"""The whole engine in virtual time.

The loop, the core, the supervisor, the pool and the credit are those of production. Only the
runner, the threads and the clock are replaced.
"""
