"""Writes the pages that repeat what the code says of itself: docs/reference, the checklist.

``python -m docs.generator`` rewrites them; a test fails while one is stale.
"""
