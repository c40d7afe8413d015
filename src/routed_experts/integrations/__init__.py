"""RL frameworks that use an Engine for their rollouts. Each module imports its framework: import the one you use."""
