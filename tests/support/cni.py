"""A network for pods with a network namespace of their own: as much CNI as a runtime insists on.

The one plugin answers with an address and touches nothing, so a pod has an ``eth0`` only on paper. It must
not know which runtime calls it.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from . import host

ADDRESS = "192.0.2.2"  # TEST-NET-1, which is nobody's

# The library that runtimes call plugins with notes every answer here, whatever their configuration says.
_RESULTS = Path("/var/lib/cni/results")

_VERSION = "0.3.1"  # the runtimes' own configuration for the loopback interface is of this one
_PLUGIN = """\
#!/bin/sh
cat > /dev/null
case $CNI_IFNAME in lo) address=127.0.0.1/8 ;; *) address=@ADDRESS@/24 ;; esac
case $CNI_COMMAND in
VERSION) echo '{"cniVersion": "@VERSION@", "supportedVersions": ["@VERSION@"]}' ;;
ADD) cat <<END ;;
{
  "cniVersion": "@VERSION@",
  "interfaces": [{"name": "$CNI_IFNAME", "sandbox": "$CNI_NETNS"}],
  "ips": [{"version": "4", "interface": 0, "address": "$address"}]
}
END
esac
"""


def install(bin_dir: Path, conf_dir: Path) -> None:
    """Write the plugin and the configuration that names it. Both folders are there already."""
    text = _PLUGIN.replace("@ADDRESS@", ADDRESS).replace("@VERSION@", _VERSION)
    for name in ("lab", "loopback"):
        path = bin_dir / name
        path.write_text(text)
        path.chmod(0o755)
    network = {"cniVersion": _VERSION, "name": "lab", "plugins": [{"type": "lab"}]}
    (conf_dir / "10-lab.conflist").write_text(json.dumps(network))


def notes_on(folder: Path) -> list[Path]:
    """What the library has noted of pods whose network namespaces lie below the folder."""
    needle = os.fsencode(f"{folder}/")
    found = []
    with contextlib.suppress(OSError):
        for path in _RESULTS.iterdir():
            with contextlib.suppress(OSError):  # the pod is just coming or going
                if needle in path.read_bytes():
                    found.append(path)
    return found


def remove_notes_on(folder: Path) -> None:
    """Remove them, and the library's folders if nothing else is in them."""
    for path in notes_on(folder):
        path.unlink(missing_ok=True)
    for each in (_RESULTS, _RESULTS.parent):
        host.remove_if_empty(each)
