"""One thread, one loop: text in, text and routing out."""
