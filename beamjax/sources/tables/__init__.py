"""Tables in files: Parquet and Arrow."""
