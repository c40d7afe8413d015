"""One architecture a file: flax.nnx modules that serve and train, and the table of names that fills them.
Knows nothing of requests, pools or schedules."""
