"""Coverage-guided fuzzing of the CDI decoder: any bytes give a Spec or a `CdiError`, and nothing else.

Arguments are libFuzzer's: ``fuzz_decode.py -max_total_time=30 CORPUS… SEEDS``. A finding ends it with an exit
code other than 0 and leaves the input where ``-artifact_prefix`` says.
"""

import json
import re
import sys

import atheris

with atheris.instrument_imports(include=["cdi_courier.cdi"]):
    from cdi_courier.cdi.edits import edits_to_dict
    from cdi_courier.cdi.validate import load_spec
from cdi_courier.errors import CdiError


def as_yaml(value: object) -> bytes:
    """Write JSON that YAML reads as the same text.

    JSON's surrogate pairs are refused in YAML, raw U+007F or U+FFFE too, and a raw U+0085 folds into a space.
    """
    text = json.dumps(value, ensure_ascii=False)
    return re.sub("[^ -~]", lambda match: f"\\U{ord(match[0]):08x}", text).encode()


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
    again = load_spec(as_yaml(written), "again.json")
    assert [device.container_edits for device in again.devices] == [
        device.container_edits for device in spec.devices
    ]
    assert again.container_edits == spec.container_edits


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
