"""Commands of those who look after a cluster: log, quotas, tokens, checks, faults."""
