"""Seconds, failures and money of one mapping."""
