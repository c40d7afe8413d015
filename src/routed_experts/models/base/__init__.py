"""What every model shares: the decoder interface, the reader of config.json, partitions of weights, rows of the
table of names."""
