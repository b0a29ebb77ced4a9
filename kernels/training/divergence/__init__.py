"""The distance of two distributions of tokens and its gradient, from logits in one kernel."""
