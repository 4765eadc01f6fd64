"""What the kernel says of a process's environment."""

from __future__ import annotations

import subprocess
import sys

from cdi_courier.host import processes
from cdi_courier.host.files import Root


def test_the_variables_of_a_process_are_those_it_was_started_with():
    """An equals sign in a value is the value's; one that has gone has none."""
    script = "print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", script],
        env={"PATH": "/a:/b", "ODD": "x=y"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = processes.environment(Root(), process.pid)
        process.kill()

    assert (found["PATH"], found["ODD"]) == ("/a:/b", "x=y")
    assert processes.environment(Root(), process.pid) == {}
