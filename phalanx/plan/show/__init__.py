"""Pictures and tables of plans."""
