"""Exact and near duplicates: MinHash keys, buckets sorted by partitions, verified pairs."""
