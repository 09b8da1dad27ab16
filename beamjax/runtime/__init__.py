"""Computes the steps of a plan, by the same code in this process and on a worker."""
