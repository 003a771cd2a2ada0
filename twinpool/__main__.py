"""``python -m twinpool``."""

from twinpool.cli.main import main

main()
