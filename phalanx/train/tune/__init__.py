"""Trials of ``phalanx tune``: real steps of a job with other settings, and the journal of them."""
