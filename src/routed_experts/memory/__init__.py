"""Pages and pools: where keys and values live, which pages are free, shared or held, and who reads them. Knows nothing
of models."""
