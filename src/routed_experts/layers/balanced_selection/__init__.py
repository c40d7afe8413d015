"""Expert selection with a capacity per expert instance, and the choice among replicas."""
