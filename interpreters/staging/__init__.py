"""From a function to blocks of equations."""
