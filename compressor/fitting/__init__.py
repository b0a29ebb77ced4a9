"""Factors for planned layers: from weights alone, or from what sample text does to them."""
