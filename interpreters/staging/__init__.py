"""Traces a function and makes blocks of equations of it."""
