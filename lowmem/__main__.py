"""`python -m lowmem` is `lowmem`."""

from lowmem.cli import main

if __name__ == "__main__":
    main()
