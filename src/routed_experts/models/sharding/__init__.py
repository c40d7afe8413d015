"""Which part of each weight a device holds, and how weights are put there."""
