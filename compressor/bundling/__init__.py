"""Joins modules of this package into a few readable files that run where it is not installed.

scopes   where the text of a module names its globals
module   one module: its text, what it defines and imports
names    one name for every definition, where several modules have the same
bundle   the files: modules in the order in which they need each other
"""
