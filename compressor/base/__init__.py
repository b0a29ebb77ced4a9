"""What every room stands on: errors, progress, files, devices, processes."""
