"""From folders to models and tokenizers, and the files that let a folder load without `blr`."""
