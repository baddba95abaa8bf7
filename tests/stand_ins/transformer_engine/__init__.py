"""A stand-in for NVIDIA's Transformer Engine, which needs a GPU: interfaces, stepped by torch."""
