"""The best mapping of a workload, and why it is the best."""
