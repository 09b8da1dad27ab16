"""The operators of a program, and their rules for JAX's transformations."""
