"""A whole token in one kernel (issue 53). Not in the product."""
