"""One run in several processes: who they are, what they share out, and sums that do not depend on it."""
