"""From checkpoint files to arrays on devices, and back."""
