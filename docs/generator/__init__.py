"""Writes the pages of ``docs/reference`` that repeat what the code says of itself.

``python -m docs.generator`` rewrites them; a test fails while one is stale.
"""
