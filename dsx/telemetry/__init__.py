"""What a run says of itself, written and read: metrics, sync records, traces, run folders, reports.

Imports core alone; nothing here decides or changes anything in a run.
"""
