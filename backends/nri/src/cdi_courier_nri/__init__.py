"""The NRI backend of cdi-courier: a plugin on a container runtime's NRI socket.

Three layers, each usable alone: protocol objects without I/O (`mux`, `ttrpc`, `session`), the socket
around them (`connection`), and what is said over it (`messages`). Nothing is imported eagerly.
"""

NAME = "nri"
"""What the backend is called: as an entry point, in the settings and in messages."""
