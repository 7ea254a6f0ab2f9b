"""`python -m elastic`: the same as the command `elastic`, also where nothing is installed."""

from elastic.cli.app import main

if __name__ == "__main__":
    main()
