"""Kernels in C: their source, and how the library that is built of it is found and called."""
