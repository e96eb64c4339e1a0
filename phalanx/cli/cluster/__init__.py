"""Commands that make a cluster and show it: server, agents, nodes, other engines."""
