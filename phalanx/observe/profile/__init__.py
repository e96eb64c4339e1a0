"""Where a step goes: from a trace of a few steps to a profile, to advice, to reports."""
