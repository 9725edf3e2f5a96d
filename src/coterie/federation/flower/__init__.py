"""Flower as a transport: the only package that imports ``flwr``.

Flower brings the SuperLink (the server's program), the calls of nodes to it, TLS, authentication and delivery. Here are
adapters from its message API to blocks of bytes (``apps``, ``messages``), the programs' command lines (``processes``),
the gate in front of the SuperLink (``gate``, ``superlink``) and its door to this machine (``superlink_door``), what
takes and answers a node's messages (``node_runner``, ``executor``) and what starts a run's process (``launcher``).
Only ``_internals`` and the three modules named like it import more of Flower than its public face.
"""
