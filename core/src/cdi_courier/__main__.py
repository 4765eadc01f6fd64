"""The command's way in: ``cdi-courier`` and ``python -m cdi_courier``.

The daemon's own start, ``cdi-courier run`` with a settings file at most, has nothing to parse and so does
without click, which a node's containers would wait for; all else is `cli`'s.
"""

from __future__ import annotations

import gc
import os
import sys

from cdi_courier.errors import CourierError, SettingsError


def main() -> None:
    """Run the command; an expected error is one message on stderr and never a traceback."""
    # What modules make while they are imported stays: the collector would look through it in vain.
    gc.disable()
    try:
        code = _run()
    except CourierError as error:
        if sys.stderr is not None:  # a launched plugin may have none
            sys.stderr.write(f"cdi-courier: {error}\n")
        code = 2 if isinstance(error, SettingsError) else 1
    except BrokenPipeError:
        code = 1  # whoever read our output has had enough
    sys.exit(code)


def _run() -> int:
    words = sys.argv[1:]
    if words[-1:] == ["run"] and not any(name.startswith("CDI_COURIER_") for name in os.environ):
        if len(words) == 1:
            return _serve(None)
        if len(words) == 3 and words[0] == "--config":
            return _serve(words[1])
    from cdi_courier import cli

    return cli.main()


def _serve(config: str | None) -> int:
    from cdi_courier import service
    from cdi_courier.settings import load

    return service.process(lambda: load(None if config is None else [config]))


if __name__ == "__main__":
    main()
