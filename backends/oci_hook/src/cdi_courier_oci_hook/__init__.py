"""The OCI hook backend: Podman precreate, runtime wrapper and live injection."""
