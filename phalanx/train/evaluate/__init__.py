"""Evaluation of models: log-likelihoods, task scores, perplexity, and text generation."""
