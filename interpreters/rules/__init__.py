"""How each primitive acts along the members."""
