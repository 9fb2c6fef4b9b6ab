"""``python -m rlplane.cli``: the command, where the console script is not on the path."""

from rlplane.cli import main

main()
