"""Whole documents as samples: which of them share one, with little padding and none cut short."""
