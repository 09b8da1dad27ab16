"""What is to be run, as data, and what follows from it alone."""
