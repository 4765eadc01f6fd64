"""What is said of the device cgroup where several modules say the same. Light module; it looks at nothing."""

from __future__ import annotations

import errno

from cdi_courier.errors import DeliveryError, quoted

BEST_EFFORT = 'or set [oci_hook] device_cgroup = "best-effort" to start containers all the same'
"""The end of a hint, for what somebody else has decided."""

NOT_PERMITTED = (errno.EPERM, errno.EACCES, errno.EROFS)
"""What the kernel answers in a user namespace, in LXC, and where a security module says no."""


def not_permitted(what: str, error: OSError) -> DeliveryError:
    """``HOK253``. what: an infinitive with its object."""
    return DeliveryError(
        "HOK253",
        f"this process may not {what}: {error.strerror}",
        "the hook needs to be root of the host with CAP_SYS_ADMIN, and a cgroup above must not forbid the "
        f"device; {BEST_EFFORT}",
    )


def unreadable(path: str, error: OSError) -> DeliveryError:
    """``HOK251``, for what is not there or not readable."""
    return DeliveryError(
        "HOK251",
        f"{quoted(path)} cannot be read: {error.strerror}",
        "has the container ended? Else are /proc and /sys/fs/cgroup mounted where the hook runs?",
    )
