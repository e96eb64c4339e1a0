"""Runs, findings, reports and traces."""
