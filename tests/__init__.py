"""The tests. A package, because some libraries install a package of this name."""
