"""Which container runtimes this host has, and what they support. Read-only: it starts and changes nothing.

`model` is what is known, with the source of each fact; `describe` asks in a child process, because grpcio
(25 MB) must not stay in a daemon. It knows nothing of backends: what follows from the facts is theirs.
"""
