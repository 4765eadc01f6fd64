"""The CRI-O backend: a drop-in that makes CRI-O run another backend."""

NAME = "cri_o_drop_in"
"""What the backend is called: as an entry point, in the settings and in messages."""
