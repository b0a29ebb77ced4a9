"""What the machine gives: devices, dtypes, threads, and how it says that it has no more."""
