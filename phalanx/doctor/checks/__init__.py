"""Checks of settings: pure functions from evidence to a judgement, and what reads the evidence.

``registry.py`` has them all; ``run.py`` runs them here or on a recorded machine; ``fix.py`` writes
the script that mends what they found.
"""
