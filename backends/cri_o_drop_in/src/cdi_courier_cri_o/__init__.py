"""The CRI-O backend: a drop-in that makes CRI-O run another backend."""
