"""Structures by name, and the folders that hold their kernels. No torch."""

# A structure's name in specs, recipes and files -> its folder here, the name that kernel tables use.
FOLDERS = {**{"svd": "lowrank", "monarch": "monarch"}, **{"blast": "blast", "ks": "kronecker"}}
