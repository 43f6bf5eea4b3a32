"""The commands that do not stand in `cli.py`, and what all of them share."""
