"""Healing: a compressed model is trained for minutes to answer as the dense one does."""
