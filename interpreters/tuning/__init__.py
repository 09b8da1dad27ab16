"""Chooses shard sizes and how passes vectorize over a shard, by timing them."""
