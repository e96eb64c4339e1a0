"""From tensors to durable bytes."""
