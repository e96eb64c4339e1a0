"""Metric storage, the tracker of runs, findings with their evidence, reports and the page.

It decides nothing about a run: what it finds goes to the cluster core as typed events.
"""
