"""`routed-experts demo`: what the package does, shown on a very small model in under a minute. Knows only public doors."""
