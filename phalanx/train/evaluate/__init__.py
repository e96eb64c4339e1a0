"""How good a model is: likelihoods of texts, scores of tasks, and text that it writes itself."""
