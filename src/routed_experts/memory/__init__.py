"""Pages and pools: where keys and values are stored, and which pages are free, shared or held."""
