"""The whole engine in virtual time: the production loop, core, supervisor, pool and credit, with
only the runner, the threads and the clock replaced."""
