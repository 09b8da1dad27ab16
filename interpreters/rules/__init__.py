"""Sharding rules: how each primitive acts along the axis of the members."""
