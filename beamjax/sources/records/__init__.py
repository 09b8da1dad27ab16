"""Files of records: TFRecord and ArrayRecord."""
