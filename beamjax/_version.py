"""The version of beamjax, read by the build without importing JAX."""

__version__ = "0.1.0"
