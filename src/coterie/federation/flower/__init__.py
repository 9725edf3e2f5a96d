"""Flower as a transport: the only place that imports ``flwr``.

Flower brings the SuperLink, the SuperNodes, TLS, authentication and delivery; here are thin adapters from its message
API to blocks of bytes, the processes' command lines, the gate in front of the SuperLink, what answers a node's messages
and what starts a run's process.
"""
