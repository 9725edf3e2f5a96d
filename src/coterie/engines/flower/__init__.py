"""Flower as a transport: the only place that imports ``flwr``.

Flower brings the SuperLink, the SuperNodes, TLS, authentication and delivery; here are thin adapters from its message
API to blocks of bytes, the processes' command lines, and the gate in front of the SuperLink.
"""
