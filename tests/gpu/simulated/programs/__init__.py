"""What runs on the simulated accelerator, each a process of its own that fails or ends well."""
