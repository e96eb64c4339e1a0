"""Proves the claims of README and docs again: one registry, one history, one page of evidence.

``claims.py`` lists what is claimed and the bar of each figure; ``python -m proof`` measures it on
this machine, compares it with its bar and with its own history, and writes ``docs/evidence.md``.
"""
