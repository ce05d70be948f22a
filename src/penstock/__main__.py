"""Runs the command `penstock` as `python -m penstock` or `torchrun ... -m penstock`."""

from penstock.cli import main

if __name__ == "__main__":
    main()
