"""All layers of one token in one kernel, by Gluon."""
