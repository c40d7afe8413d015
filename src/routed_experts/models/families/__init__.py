"""One file per model family: config, layer specs and tensor names."""
