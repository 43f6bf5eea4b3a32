"""The papers' nets, and how to bring your own."""

from kinfolk.models.nets import NETS, Factory, find, make

__all__ = ["NETS", "Factory", "find", "make"]
