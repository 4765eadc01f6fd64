"""What a set of spec directories defines at one moment, and why it does not define a name.

Immutable. Built by `registry`; it must not touch the file system.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from attrs import field, frozen

from cdi_courier.cdi.edits import concatenate
from cdi_courier.cdi.model import ContainerEdits, Device, Spec
from cdi_courier.errors import CdiError, quoted
from cdi_courier.names import parse_qualified, split_kind

# An explanation may end in a container's status, which a person reads and a runtime limits.
_MAX_LISTED: Final = 8
_MAX_NAME: Final = 100
_MAX_REASON: Final = 400
_MAX_EXPLAINED: Final = 16
# Answers kept in a snapshot. Who asks may ask for any combination, so there must be an end to it.
_MAX_RESOLUTIONS: Final = 256


@frozen
class SpecFile:
    """A valid, trusted spec file. `priority` is the index of its directory."""

    path: str
    priority: int
    spec: Spec


@frozen
class DeviceEntry:
    """The definition of a device that is in force."""

    path: str
    device: Device
    spec: Spec


@frozen
class Resolution:
    """What names resolve to.

    edits: merged as CDI prescribes, a spec file's own edits once and before its first device's.
    files: name → the spec file that defines it.
    """

    edits: ContainerEdits
    files: Mapping[str, str]


@frozen
class Snapshot:
    """The devices of all spec directories.

    dirs: the directories asked for, ascending priority, and found: those of them that exist.
    specs: valid and trusted files in scan order; also those whose devices all lost to others.
    devices: qualified name → entry, for every name that resolves.
    errors: path → why the file does not count, or which of its devices conflict.
    dir_errors: directory → why it could not be read.
    conflicts: qualified name → the files of one directory that define it; none of them counts.
    blocked: qualified name → the error of an untrusted file that defines it.
    """

    dirs: tuple[str, ...]
    found: tuple[str, ...]
    specs: tuple[SpecFile, ...]
    devices: Mapping[str, DeviceEntry]
    errors: Mapping[str, tuple[CdiError, ...]]
    dir_errors: Mapping[str, CdiError]
    conflicts: Mapping[str, tuple[str, ...]]
    blocked: Mapping[str, CdiError]
    _resolutions: dict[tuple[str, ...], Resolution] = field(factory=dict, init=False, eq=False, repr=False)

    def resolve(self, names: Sequence[str]) -> Resolution:
        """Merge the edits of `names`, in their order. Names are expected without duplicates.

        The same names get the same object again, so that what is made of it can be kept. Raises one
        `CdiError` that explains every name that does not resolve.
        """
        key = tuple(names)
        resolution = self._resolutions.get(key)
        if resolution is None:
            resolution = self._resolve(key)
            if len(self._resolutions) >= _MAX_RESOLUTIONS:
                self._resolutions.clear()
            self._resolutions[key] = resolution
        return resolution

    def _resolve(self, names: tuple[str, ...]) -> Resolution:
        missing = [name for name in dict.fromkeys(names) if name not in self.devices]
        if missing:
            raise self._explain_all(missing, total=len(names))
        parts: list[ContainerEdits] = []
        files: dict[str, str] = {}
        used: set[str] = set()
        for name in names:
            entry = self.devices[name]
            if entry.path not in used:
                parts.append(entry.spec.container_edits)
            used.add(entry.path)
            parts.append(entry.device.container_edits)
            files[name] = entry.path
        return Resolution(concatenate(parts), files)

    def explain(self, name: str) -> CdiError:
        """Return why `name` does not resolve. Raises `ValueError` if it does."""
        if name in self.devices:
            raise ValueError(f"{name} resolves")
        try:
            vendor, class_, _ = parse_qualified(name)
        except CdiError as error:
            return error
        if name in self.blocked:
            return _because(name, self.blocked[name])
        if name in self.conflicts:
            return CdiError(
                "CDI008",
                f"device {_short(name)} is defined by more than one file of the same directory: "
                f"{_listed(self.conflicts[name])}",
                "delete or rename all but one of them",
                device=name,
                file=self.conflicts[name][0],
            )
        return self._unknown(name, vendor, class_)

    def _unknown(self, name: str, vendor: str, class_: str) -> CdiError:
        code, cause, hint = self._nearest(name, vendor, class_)
        suspects = [
            _cut(errors[0].message, _MAX_REASON)
            for errors in self.errors.values()
            if _might_define(errors, f"{vendor}/{class_}")
        ]
        suspects += [_cut(error.message, _MAX_REASON) for error in self.dir_errors.values()]
        if suspects:
            more = f" (and {len(suspects) - 3} more)" if len(suspects) > 3 else ""
            return CdiError(
                "CDI013",
                f"{cause}, but not everything could be read: {'; '.join(suspects[:3])}{more}",
                "if that is where the device should be defined, mend it",
                device=name,
            )
        return CdiError(code, cause, hint, device=name)

    def _nearest(self, name: str, vendor: str, class_: str) -> tuple[str, str, str]:
        """Return code, cause and hint for a name that no file defines."""
        kinds = {split_kind(file.spec.kind) for file in self.specs}
        device = f"device {_short(name)}"
        if not kinds:
            looked = _listed(self.dirs) if self.dirs else "no directory is configured"
            state = "has a valid spec file" if self.found or self.dir_errors else "exists"
            return (
                "CDI014",
                f"{device} is unknown: none of the spec directories {state} ({looked})",
                "put the vendor's CDI spec there, or set [cdi] dirs",
            )
        vendors = {known for known, _ in kinds}
        if vendor not in vendors:
            return (
                "CDI010",
                f"{device} is unknown: no spec file is of vendor {_short(vendor)}",
                f"known vendors: {_candidates(vendor, vendors)}",
            )
        classes = {known for owner, known in kinds if owner == vendor}
        if class_ not in classes:
            return (
                "CDI011",
                f"{device} is unknown: vendor {_short(vendor)} has no class {_short(class_)}",
                f"its classes: {_candidates(class_, classes)}",
            )
        prefix = f"{vendor}/{class_}="
        known_names = {known for known in self.devices if known.startswith(prefix)}
        hint = f"known: {_candidates(name, known_names)}" if known_names else "none of its devices is usable"
        return "CDI012", f"{device} is unknown: no spec file of {vendor}/{class_} defines it", hint

    def _explain_all(self, missing: list[str], total: int) -> CdiError:
        if len(missing) == 1:
            return self.explain(missing[0])
        reasons = [self.explain(name) for name in missing]
        texts = [f"{error.code} {error.message}" for error in reasons[:_MAX_EXPLAINED]]
        texts += [f"{error.code} {_short(name)}" for error, name in zip(reasons, missing, strict=True)][
            _MAX_EXPLAINED:
        ]
        hints = dict.fromkeys(error.hint for error in reasons[:_MAX_EXPLAINED] if error.hint)
        return CdiError(
            "CDI015",
            f"{len(missing)} of {total} devices cannot be resolved: {'; '.join(texts)}",
            "; ".join(hints),
            device=",".join(missing),
        )


def _because(name: str, error: CdiError) -> CdiError:
    text = f"device {_short(name)} is refused: {_cut(error.message, _MAX_REASON)}"
    return CdiError(error.code, text, error.hint, **{**error.fields, "device": name})


def _might_define(errors: tuple[CdiError, ...], kind: str) -> bool:
    """Whether a file might define devices of `kind`, had it been understood. An untrusted one has been."""
    error = errors[0]
    return error.code not in ("CDI007", "CDI008") and error.fields.get("kind", kind) == kind


def _candidates(wanted: str, known: Iterable[str]) -> str:
    """Return all that is known if that is little, else what is near."""
    every = sorted(known)
    if len(every) <= _MAX_LISTED:
        return _listed(every)
    import difflib  # for a mistake only

    near = difflib.get_close_matches(wanted, every[:10_000], n=_MAX_LISTED)
    return f"{_listed(near)} and {len(every) - len(near)} others" if near else _listed(every)


def _listed(items: Sequence[str]) -> str:
    text = ", ".join(_cut(item, _MAX_NAME) for item in items[:_MAX_LISTED])
    return text if len(items) <= _MAX_LISTED else f"{text} and {len(items) - _MAX_LISTED} others"


def _short(text: str) -> str:
    return quoted(text, _MAX_NAME)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[:limit] + "…"
