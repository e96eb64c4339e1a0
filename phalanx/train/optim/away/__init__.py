"""Optimizer state that lives off the device: pinned host memory, or a file on the node's NVMe."""
