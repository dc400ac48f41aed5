"""`python -m router` is the command `pointsman`."""

from router.cli import main

main()
