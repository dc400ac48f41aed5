"""`python -m router` is the command `pointsman`."""

from router.start.cli import main

main()
