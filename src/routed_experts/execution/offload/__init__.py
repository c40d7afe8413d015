"""Steps of models whose experts are split between the accelerator and the host."""
