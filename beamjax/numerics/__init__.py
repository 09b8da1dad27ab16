"""Reductions on the host whose bits do not depend on the order of their terms."""
