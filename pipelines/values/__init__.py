"""Values between the steps of a run: elements, references, files, and sources over files."""
