"""Building an engine: backends, memory planning, model placement, self check and step costs."""
