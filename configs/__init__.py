"""Architecture knowledge as data: one YAML file a family, and the table of short names."""
