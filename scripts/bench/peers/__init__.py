"""Other packages on the same model, calibration tokens and texts as ours: see README.md here."""
