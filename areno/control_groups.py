"""The control groups (cgroups) of this process, which limit its CPU time and its memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """A control group. In some containers, its ``folder`` does not exist. ``version`` is the version of cgroups, 1 or 2."""

    folder: Path
    version: int

    def read(self, name: str) -> str:
        """Return the content of a file. Raises OSError or UnicodeDecodeError if the file cannot be read."""
        return (self.folder / name).read_text(encoding="ascii")


def groups_of(controller: str, root: Path = GROUPS, membership: Path = MEMBERSHIP) -> Iterator[ControlGroup]:
    """Yield the groups of this process, from its own group up to the root.

    Only groups of ``controller`` (``cpu`` or ``memory``) and groups of cgroup v2 are included.
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
