"""`blr sweep`: many compressions of one model, and what each loses for its bits."""
