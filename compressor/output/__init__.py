"""What every folder that is written holds beside its tensors, and how it is committed."""
