"""From tensors to durable bytes; which checkpoints are kept."""
