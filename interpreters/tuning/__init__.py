"""Sizes of shards, and how the members of one are computed."""
