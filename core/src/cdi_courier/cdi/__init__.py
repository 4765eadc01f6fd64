"""CDI: spec files, what they define, and what that does to a container.

Knows files and the CDI specification; nothing of annotations, policy, runtimes or how edits are delivered.
"""
