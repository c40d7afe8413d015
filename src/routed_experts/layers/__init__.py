"""Pure array code: the arithmetic of a transformer layer.
Knows nothing of models, requests or pools; every function takes arrays and returns arrays."""
