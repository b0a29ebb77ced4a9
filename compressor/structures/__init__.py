"""The structured families: shapes, factorizers and the registry that names them."""
