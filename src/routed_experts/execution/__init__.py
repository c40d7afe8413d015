"""Run a step: one put, a jitted forward, a jitted sampler, fresh outputs.
Knows nothing of queues or text; a batch comes in, arrays go out one step late."""
