"""Other packages on the same model, calibration tokens and texts as blr: `run`, then `draw`."""
