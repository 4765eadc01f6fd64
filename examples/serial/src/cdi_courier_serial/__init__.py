"""Serial ports for cdi-courier: an example of a plugin that is not its own.

A backend (`backend`), an annotation dialect (`dialect`) and a generator of CDI specs (`generator`), each
usable without the others. `plugin` is the entry point of the last two.
"""
