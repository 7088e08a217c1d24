"""A launcher whose tasks are local processes that connect over TCP, as if each task ran on its own node."""

from __future__ import annotations

import os
import subprocess
import uuid
from contextlib import nullcontext

from areno.launch.launcher import NODE, Names, RemoteLauncher, RoleNeed
from areno.name_resolve import NameOptions


class LoopbackProcess(subprocess.Popen):
    node = ""


class LoopbackLauncher(RemoteLauncher):
    def __init__(self, folder, needs=None, options=None, host="127.0.0.1") -> None:
        options = options or NameOptions("nfs", str(folder / "names"))
        super().__init__(needs or {"": RoleNeed()}, Names(options, f"test/{uuid.uuid4().hex}"), host)

    def resize(self, role, workers):
        """There is always room."""

    def launch(self, task):
        node = f"node-{task.number}"
        with open(task.log_file, "ab") if task.log_file else nullcontext() as log:
            process = LoopbackProcess(
                self.needs[task.role].command(task),
                env={**os.environ, **task.environment, NODE: node},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        process.node = node
        return process
