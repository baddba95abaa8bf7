"""A stand-in for NVIDIA's apex, which needs a GPU: its optimizers' interface, stepped by torch."""
