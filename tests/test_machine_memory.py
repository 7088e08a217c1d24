"""The memory that a process may use, in the control groups of Slurm, systemd and Docker."""

from __future__ import annotations

from pathlib import Path

from areno.machine_memory import group_limit, left_in_groups

GIB = 2**30


def _group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("memory_", "memory.", 1)).write_text(f"{value}\n")


def test_the_limit_of_a_slurm_job_is_that_of_its_own_group(tmp_path):
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    membership.write_text("0::/system.slice/slurmstepd.scope/job_7/step_0\n")
    job = root / "system.slice" / "slurmstepd.scope" / "job_7"
    _group(root)  # the root has no limit files
    _group(job, memory_max=32 * GIB, memory_current=20 * GIB, memory_stat=f"anon 5\ninactive_file {4 * GIB}")
    _group(job / "step_0", memory_max="max", memory_current=1 * GIB, memory_stat="inactive_file 0")
    assert group_limit(root, membership) == 32 * GIB
    assert left_in_groups(root, membership) == 16 * GIB
    _group(job / "step_0", memory_max=8 * GIB)
    assert (group_limit(root, membership), left_in_groups(root, membership)) == (8 * GIB, 7 * GIB)


def test_the_limit_of_a_container_with_older_control_groups(tmp_path):
    """The named group is that of the host; the container sees its own group as the root."""
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    membership.write_text("5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/\n")
    _group(root / "memory", memory_limit_in_bytes=8 * GIB, memory_usage_in_bytes=6 * GIB)
    _group(root / "memory", memory_stat=f"inactive_file 7\ntotal_inactive_file {1 * GIB}")
    assert (group_limit(root, membership), left_in_groups(root, membership)) == (8 * GIB, 3 * GIB)


def test_without_control_groups_or_limits_memory_is_unlimited(tmp_path):
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    assert group_limit(root, membership) == left_in_groups(root, membership) >= 2**50
    membership.write_text("5:memory:/\n0::/mine\n")
    _group(root / "memory", memory_limit_in_bytes=9223372036854771712, memory_usage_in_bytes=6 * GIB)
    _group(root / "mine", memory_max="max", memory_current=6 * GIB)
    assert group_limit(root, membership) == left_in_groups(root, membership) >= 2**50
