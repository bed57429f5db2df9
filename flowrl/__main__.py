"""`python -m flowrl`: the command line."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        # `-m` looks in the working directory first: a user's yaml.py there would take the place of a library.
        sys.path.append(sys.path.pop(0))
    from flowrl.cli import main

    main()
