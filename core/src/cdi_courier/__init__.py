"""Delivers CDI devices to containers that ask for them by annotation.

Nothing is imported here: the light modules are loaded by a process that starts once per container
(docs/architecture.md, "Light modules").
"""
