"""Random programs of beamjax, run by every runner and compared with `jax.jit`."""
