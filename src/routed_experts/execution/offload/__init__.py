"""Steps of models whose experts are shared between the device and its host."""
