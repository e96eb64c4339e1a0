"""The jobs of a node: their workers and keepers, and what these say."""
