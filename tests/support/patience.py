"""How long a test waits for a process that should have ended: a safety net, which decides nothing."""

PATIENCE = 1800  # seconds, far beyond what any command takes on a busy machine
