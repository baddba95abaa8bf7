"""How fp32 values travel as bytes: formats, and the codecs that write and read them.

Imports core alone, and nothing else of compress.
"""
