"""Coverage-guided fuzzing of the CDI decoder: any bytes give a Spec or a `CdiError`, and nothing else.

Arguments are libFuzzer's: ``fuzz_decode.py -max_total_time=30 CORPUS… SEEDS``. A finding ends it with an exit
code other than 0 and leaves the input beside the current folder.
"""

import json
import sys

import atheris

with atheris.instrument_imports(include=["cdi_courier.cdi"]):
    from cdi_courier.cdi.edits import edits_to_dict
    from cdi_courier.cdi.validate import load_spec
from cdi_courier.errors import CdiError


def one_input(data: bytes) -> None:
    """Decode; what decodes must survive being written out and read again."""
    try:
        spec = load_spec(data, "fuzz.yaml")
    except CdiError as error:
        str(error).encode()
        return
    devices = [
        {"name": device.name, "containerEdits": edits_to_dict(device.container_edits)}
        for device in spec.devices
    ]
    written = {
        "cdiVersion": "1.1.0",
        "kind": spec.kind,
        "devices": devices,
        "containerEdits": edits_to_dict(spec.container_edits),
    }
    # Not escaped: CDI's decoder refuses escaped surrogates, as the reference does.
    again = load_spec(json.dumps(written, ensure_ascii=False).encode(), "again.json")
    assert [device.container_edits for device in again.devices] == [
        device.container_edits for device in spec.devices
    ]
    assert again.container_edits == spec.container_edits


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
