"""The tests. A package with this file, because some packages install a package of this name too."""
