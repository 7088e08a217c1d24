#!/usr/bin/env bash
# Install the services that the tests of this folder use, from Debian's or Ubuntu's packages. Nothing is started.
set -e
apt-get install --yes --no-install-recommends etcd-server etcd-client slurmctld slurmd slurm-client munge
