"""The bodies of steps: a JAX function to StableHLO and back to a callable, in any process."""
