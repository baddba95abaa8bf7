"""Lightning's Trainer, of `lightning` and of `pytorch_lightning`.

Each file replaces what it names, once the Trainer has been imported by the script.
"""
