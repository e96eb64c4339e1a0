"""The best mapping of a workload, why it is the best, and the answer as other packages read it."""
