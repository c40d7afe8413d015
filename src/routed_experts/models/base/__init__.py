"""What every model shares: the decoder interface and the reading of config.json."""
