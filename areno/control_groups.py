"""The control groups (cgroups) of this process, which limit its CPU time and its memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """A control group.

    ``folder`` is the group's folder below ``/sys/fs/cgroup``. In some containers, this folder does not exist. ``version`` is
    the version of cgroups, 1 or 2.
    """

    folder: Path
    version: int

    def read(self, name: str) -> str:
        """Return the content of the file ``name`` in the group's folder.

        Raises OSError or UnicodeDecodeError if the file cannot be read.
        """
        return (self.folder / name).read_text(encoding="ascii")


def groups_of(controller: str, root: Path = GROUPS, membership: Path = MEMBERSHIP) -> Iterator[ControlGroup]:
    """Yield the groups of this process, from its own group up to the root.

    With cgroup v1, only groups of ``controller`` (``cpu`` or ``memory``) are included. With cgroup v2, all groups are included,
    because each group serves all controllers.
    """
    try:
        lines = membership.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # In a container the named group may be the mounted root itself.
        for group in (leaf := PurePosixPath("/" + path.strip("/")), *leaf.parents):
            top = root / controller if controllers else root
            yield ControlGroup(top / group.relative_to("/"), 1 if controllers else 2)
