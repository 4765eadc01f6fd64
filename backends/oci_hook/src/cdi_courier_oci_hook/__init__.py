"""The OCI hook backend: Podman precreate, runtime wrapper and live injection."""

NAME = "oci_hook"
"""What the backend is called: as an entry point, in the settings and in messages."""
