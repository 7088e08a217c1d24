"""The services as fixtures."""

from tests.launch.services import etcd_server, ray_cluster, ray_nodes, slurm_nodes  # noqa: F401
