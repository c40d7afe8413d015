"""A fleet: several engines behind one endpoint, placed and supervised by Ray. The only room that imports Ray."""
