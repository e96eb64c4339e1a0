"""Queue policies compared on a recorded trace, each as settings of the core that runs live."""
