"""A program that a test kills: it sends weights to a fleet of two replicas, and waits for answers."""

from __future__ import annotations

import sys
import time

from areno.engine.engine import Engine
from areno.rollouts.fleet.fleet import FleetOptions, RolloutFleet
from tests.experiments.fleet.conftest import config
from tests.experiments.fleet.support import requests

if __name__ == "__main__":
    policy, folder = sys.argv[1:]
    fleet = RolloutFleet(policy, config(), FleetOptions(replicas=2, log_folder=folder))
    fleet.update_weights(Engine(policy, config()), 1)
    fleet.submit(requests(4, tokens=4000))
    print(*[pid for replica in fleet.health().replicas for pid in replica.worker.pids], flush=True)
    time.sleep(60)
