"""One module for each command of `blr`; the command line calls these functions."""
