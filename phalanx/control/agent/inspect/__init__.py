"""What people ask a node for: logs, records, shells, stacks."""
