"""Arrays in files: NumPy and Zarr."""
