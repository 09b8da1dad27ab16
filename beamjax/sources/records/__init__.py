"""Files of records of `tf.train.Example`: TFRecord."""
