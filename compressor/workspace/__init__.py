"""The folder that a run writes: its lock, its journal, its shards, its manifest, and who owns it."""
