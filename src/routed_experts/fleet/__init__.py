"""A fleet: several engines behind one endpoint, placed and supervised by Ray. Only it, and the
command that starts it, import Ray."""
