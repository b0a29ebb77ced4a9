"""Joins modules of this package into a few readable files that run where it is not installed. module one
module: its text, what it defines and imports, and where it names its globals bundle the files: modules
in the order in which they need each other, one name for every definition"""
