"""`python -m expertd` is the `expertd` command."""

from expertd.cli import main

if __name__ == "__main__":
    main()
