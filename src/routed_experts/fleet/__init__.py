"""A fleet: several engines behind one endpoint, placed and supervised by Ray. Beside the command that starts it, the only room that imports Ray."""
