"""``python -m headgate.cli``: the same as ``headgate``."""

from headgate.cli.main import main

if __name__ == "__main__":
    main()
