"""The update of weights and what guards it."""
