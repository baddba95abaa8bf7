"""A simulated accelerator in CUDA's place, in processes of their own, and what runs on it there."""
