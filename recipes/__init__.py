"""Shipped recipes."""
