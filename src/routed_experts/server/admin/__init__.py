"""Routes of operators: weights, pause, health, metrics and server information."""
