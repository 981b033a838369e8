"""The C++ kernels of a CPU's step; compiled and called by `engine.worker.forward.native`."""
