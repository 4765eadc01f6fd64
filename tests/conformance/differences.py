"""Where we differ from the reference on purpose. More than five would be a failure of ours, not a list."""

from __future__ import annotations

MAX_DIFFERENCES = 5

# File and id → why one of us refuses what the other takes.
DIFFERENCES = {
    ("decode", "dup-key-case"): (
        "two spellings of one field in one mapping are refused: the reference merges them in bytewise key "
        "order, which nobody means (docs/facts.md#cdi-field-names)"
    ),
}
