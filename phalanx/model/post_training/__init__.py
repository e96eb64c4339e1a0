"""What post-training makes of a model: adapters beside frozen weights, and a loss of pairs."""

from phalanx.model.post_training.prepare import prepare_post_training

__all__ = ["prepare_post_training"]
