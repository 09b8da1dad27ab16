"""The operators of a program, and their rules for the transformations of JAX."""
