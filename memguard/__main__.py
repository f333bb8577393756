"""`python -m memguard`."""

from memguard.cli import main

main()
