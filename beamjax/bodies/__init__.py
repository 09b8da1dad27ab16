"""The bodies of steps: exports JAX functions to StableHLO, and loads them in any process."""
