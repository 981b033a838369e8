"""The forward pass: attention, paged KV cache, compiled kernels."""
