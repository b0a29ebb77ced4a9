"""The relative distance of rows of hidden states and its gradient, each in one kernel."""
