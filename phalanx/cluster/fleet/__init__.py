"""The nodes: state, health, spares."""
