"""Prometheus metrics of one server. `metrics` has the registry; the other modules are the families in it."""
