"""Steps of models with experts split between the device and its host."""
