"""What a run across slow links will do, computed before it is started: no torch, no network.

Imports outer's account of what it keeps and sends, config, method and what stands below them;
nothing that runs.
"""
