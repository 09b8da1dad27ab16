"""A plan as a graph of Beam."""
