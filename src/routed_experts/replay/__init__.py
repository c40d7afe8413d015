"""Training on what an engine recorded: the same module, whole sequences, live or replayed routing.
Knows nothing of pools, pages or requests. Replay is an argument, never a mode."""
