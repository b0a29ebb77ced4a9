"""What happens to each layer, decided from headers alone and without torch."""
