"""The simulator: virtual time, fault models and workloads around the unchanged cluster core."""
