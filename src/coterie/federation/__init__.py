"""A federation between machines: the server's and the nodes' half, whatever carries the messages."""
