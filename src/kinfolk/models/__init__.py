"""The papers' nets, and how to bring your own."""

from kinfolk.models.nets import DERIVED, NETS, Factory, find, make

__all__ = ["DERIVED", "NETS", "Factory", "find", "make"]
