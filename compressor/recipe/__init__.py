"""Settings: the schema of a recipe, its YAML read as hostile input, the shipped ones."""
