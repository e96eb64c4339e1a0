"""Commands for pipelines and for the models that come out of them."""
