"""Cuts a program into stages, which run one after the other."""
