"""What a user writes, a "dsx" block or flags, read strictly into a method and settings.

Imports method and what stands below it; nothing that runs.
"""
