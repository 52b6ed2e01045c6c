"""Trace files: what a run was (its first line), then one JSON line a round; written, read, re-told, checked.

write.py writes them, read.py reads those of strangers, tell.py and page.py show them, check.py runs one
again.
"""
