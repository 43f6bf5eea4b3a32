"""`python -m kinfolk`: the command line without the installed script."""

import sys

from kinfolk.cli import main

if __name__ == "__main__":
    sys.argv[0] = "kinfolk"  # what a run notes as the command that made it
    main()
