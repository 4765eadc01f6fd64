"""Injection into a container that exists already: light modules, each with one part of it."""
