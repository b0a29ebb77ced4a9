"""Text to train on: token windows of files, and text that a model writes itself."""
