"""Norms, gates, activations and rotary positions as one kernel each."""
