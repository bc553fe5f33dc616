"""Memory-planned training steps for PyTorch."""
