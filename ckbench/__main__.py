"""Run the command line as ``python -m ckbench``."""

from ckbench.cli import main

if __name__ == "__main__":
    main()
