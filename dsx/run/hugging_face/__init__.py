"""The Hugging Face Trainer, and what is built on it: TRL's trainers, and those of others.

Each file replaces what it names, once transformers or accelerate has been imported by the script.
"""
