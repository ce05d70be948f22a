"""Conformance checks for those who bring a transport of their own: the same ones that Penstock's are held to."""

from penstock.testing.transports import check_transport

__all__ = ["check_transport"]
