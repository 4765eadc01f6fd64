"""The NRI and ttrpc messages, built from a table held against docs/facts.md#ttrpc-messages, #nri-messages.

It must not know what the messages are used for. Only fields that somebody reads or writes are declared:
the parser skips the others, and skipping is what keeps a request cheap. Where two readers of one message
need different depths there are two classes for it (see `Container` and `ContainerDetails`).
"""

from __future__ import annotations

from typing import Any

from cdi_courier.descriptors import message_classes

NRI_VERSION = "v0.12.2"
"""The newest NRI release whose schema the table follows; told to the runtime, which only logs it."""

CREATE_CONTAINER_EVENT = 1 << 3
"""ConfigureResponse.events for CREATE_CONTAINER alone; never 0, which means every event
(docs/facts.md#nri-events)."""

_M = message_classes(
    "nri.pkg.api.v1alpha1",
    {
        # ttrpc's envelope (docs/facts.md#ttrpc-messages). Metadata and a status' details are skipped.
        "Request": "1 service string, 2 method string, 3 payload bytes, 4 timeout_nano int64",
        "Response": "1 status Status, 2 payload bytes",
        "Status": "1 code int32, 2 message string",
        # The session (docs/facts.md#nri-handshake).
        "RegisterPluginRequest": "1 plugin_name string, 2 plugin_idx string, 3 NRI_version string",
        "ConfigureRequest": """1 config string, 2 runtime_name string, 3 runtime_version string,
            4 registration_timeout int64, 5 request_timeout int64, 6 NRI_version string""",
        "ConfigureResponse": "2 events int32",
        "SynchronizeRequest": "1 pods PodSandbox*, 2 containers ListedContainer*, 3 more bool",
        "SynchronizeMore": "3 more bool",  # SynchronizeRequest at a tenth of the price
        "SynchronizeResponse": "2 more bool",
        "CreateContainerRequest": "1 pod AskingPod, 2 container Container",
        "CreateContainerDetails": "2 container ContainerDetails",  # CreateContainerRequest again, deeper
        # The two with the envelope around them, which says that it holds them: one reading instead of two.
        "EnvelopedCreateContainer": "3 payload CreateContainerRequest, 4 timeout_nano int64",
        "EnvelopedDetails": "3 payload CreateContainerDetails",
        "CreateContainerResponse": "1 adjust ContainerAdjustment",
        # What the runtime shows.
        "AskingPod": "2 name string, 4 namespace string, 6 annotations map<string,string>",
        "PodSandbox": """1 id string, 2 name string, 3 uid string, 4 namespace string,
            6 annotations map<string,string>""",
        "Container": "3 name string, 20 CDI_devices CDIDevice*",
        "ListedContainer": """1 id string, 2 pod_sandbox_id string, 3 name string, 4 state int32,
            6 annotations map<string,string>""",
        "ContainerDetails": """8 env string*, 9 mounts Mount*, 10 hooks Hooks, 11 linux LinuxContainer,
            21 user User""",
        "LinuxContainer": "1 namespaces LinuxNamespace*, 2 devices LinuxDevice*, 3 resources LinuxResources",
        "LinuxNamespace": "1 type string, 2 path string",
        "User": "1 uid uint32, 2 gid uint32, 3 additional_gids uint32*",
        # What the plugin changes.
        "ContainerAdjustment": """2 annotations map<string,string>, 3 mounts Mount*, 4 env KeyValue*,
            5 hooks Hooks, 6 linux LinuxContainerAdjustment, 8 CDI_devices CDIDevice*""",
        # The same bytes with what is inside left encoded, so that it can be encoded once and used often.
        "EncodedCreateContainerResponse": "1 adjust bytes",
        "EncodedContainerAdjustment": "6 linux bytes",
        "EncodedLinuxContainerAdjustment": "1 devices bytes*",
        "LinuxContainerAdjustment": """1 devices LinuxDevice*, 2 resources LinuxResources,
            9 net_devices map<string,LinuxNetDevice>, 11 rdt LinuxRdt""",
        "LinuxResources": "7 devices LinuxDeviceCgroup*",
        "LinuxDeviceCgroup": """1 allow bool, 2 type string, 3 major OptionalInt64, 4 minor OptionalInt64,
            5 access string""",
        "LinuxNetDevice": "1 name string",
        "LinuxRdt": """1 clos_id OptionalString, 2 schemata OptionalRepeatedString,
            3 enable_monitoring OptionalBool""",
        "CDIDevice": "1 name string",
        # Both ways.
        "KeyValue": "1 key string, 2 value string",
        "Mount": "1 destination string, 2 type string, 3 source string, 4 options string*",
        "Hooks": """1 prestart Hook*, 2 create_runtime Hook*, 3 create_container Hook*,
            4 start_container Hook*, 5 poststart Hook*, 6 poststop Hook*""",
        "Hook": "1 path string, 2 args string*, 3 env string*, 4 timeout OptionalInt",
        "LinuxDevice": """1 path string, 2 type string, 3 major int64, 4 minor int64,
            5 file_mode OptionalFileMode, 6 uid OptionalUInt32, 7 gid OptionalUInt32""",
        # A present wrapper of zero length is an explicit zero; an absent one is "not set"
        # (docs/facts.md#nri-optional-values).
        "OptionalBool": "1 value bool",
        "OptionalFileMode": "1 value uint32",
        "OptionalInt": "1 value int64",
        "OptionalInt64": "1 value int64",
        "OptionalRepeatedString": "1 value string*",
        "OptionalString": "1 value string",
        "OptionalUInt32": "1 value uint32",
    },
)

Request: Any = _M["Request"]
Response: Any = _M["Response"]
Status: Any = _M["Status"]

RegisterPluginRequest: Any = _M["RegisterPluginRequest"]
ConfigureRequest: Any = _M["ConfigureRequest"]
ConfigureResponse: Any = _M["ConfigureResponse"]
SynchronizeRequest: Any = _M["SynchronizeRequest"]
SynchronizeMore: Any = _M["SynchronizeMore"]
SynchronizeResponse: Any = _M["SynchronizeResponse"]
CreateContainerRequest: Any = _M["CreateContainerRequest"]
CreateContainerDetails: Any = _M["CreateContainerDetails"]
EnvelopedCreateContainer: Any = _M["EnvelopedCreateContainer"]
EnvelopedDetails: Any = _M["EnvelopedDetails"]
CreateContainerResponse: Any = _M["CreateContainerResponse"]

PodSandbox: Any = _M["PodSandbox"]
Container: Any = _M["Container"]
ListedContainer: Any = _M["ListedContainer"]
ContainerDetails: Any = _M["ContainerDetails"]
User: Any = _M["User"]

ContainerAdjustment: Any = _M["ContainerAdjustment"]
LinuxContainerAdjustment: Any = _M["LinuxContainerAdjustment"]
EncodedCreateContainerResponse: Any = _M["EncodedCreateContainerResponse"]
EncodedContainerAdjustment: Any = _M["EncodedContainerAdjustment"]
EncodedLinuxContainerAdjustment: Any = _M["EncodedLinuxContainerAdjustment"]
LinuxDeviceCgroup: Any = _M["LinuxDeviceCgroup"]
LinuxNetDevice: Any = _M["LinuxNetDevice"]
LinuxRdt: Any = _M["LinuxRdt"]
CDIDevice: Any = _M["CDIDevice"]
KeyValue: Any = _M["KeyValue"]
Mount: Any = _M["Mount"]
Hooks: Any = _M["Hooks"]
Hook: Any = _M["Hook"]
LinuxDevice: Any = _M["LinuxDevice"]


class Undecodable(ValueError):  # noqa: N818 - says what the bytes are
    """The bytes are no such message."""


def decode(message: Any, data: bytes) -> Any:
    """Read `data` as a `message`, a class of this module.

    Raises Undecodable, whatever the installed protobuf raises: its Python version lets UnicodeDecodeError,
    struct.error and others through beside DecodeError, depending on the release.
    """
    try:
        return message.FromString(data)
    except Exception as error:
        raise Undecodable(f"not a {message.DESCRIPTOR.name}: {error}") from error
