"""Weight transfer engine for vLLM servers. Weights are broadcast with gloo between CPUs and with NCCL between GPUs.

vLLM's workers import this module in an environment that may lack areno. A request to ``/init_weight_transfer_engine`` lets the
workers join the trainer's process group. Requests to ``/start_weight_update``, ``/update_weights`` and
``/finish_weight_update`` load new weights.
"""

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

_ALIGN = 64  # the layout of areno.rollouts.fleet.tensors


@dataclass
class GroupInfo(WeightTransferInitInfo):
    """Parameters for joining the trainer's process group: the address of the trainer's TCP store (``host`` and ``port``), the
    rank of this server's first worker (``first``), and the number of members (``size``)."""

    host: str
    port: int
    first: int
    size: int
    patience_s: float


@dataclass
class WeightInfo(WeightTransferUpdateInfo):
    """The tensors to receive, in order.

    Consecutive tensors are packed into a bucket of at most ``bucket_bytes`` bytes, and each bucket is broadcast as a whole. A
    larger tensor is alone in its bucket.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    bucket_bytes: int


class ArenoTransfer(WeightTransferEngine[GroupInfo, WeightInfo]):
    """Receives weights in a vLLM worker (see the module's docstring)."""

    init_info_cls = GroupInfo
    update_info_cls = WeightInfo
    _group: Any = None

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        """Join the trainer's group."""
        self.shutdown()
        config = self.parallel_config
        rank = init_info.first + config.data_parallel_index * config.world_size + config.rank
        patience = timedelta(seconds=init_info.patience_s)
        store = dist.TCPStore(init_info.host, init_info.port, init_info.size, False, patience)
        if self.device.type == "cuda":
            nccl: Any = dist.ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = patience
            self._group = nccl(store, rank, init_info.size, options)
            return
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = patience
        options._devices = [gloo.create_device(hostname=_own_address(init_info.host))]
        self._group = gloo(store, rank, init_info.size, options)

    def start_weight_update(self) -> None:
        """Start an update. The model cannot run until :meth:`finish_weight_update` is called."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive all weights. Unlike the base class, this method synchronizes the device only if it is a GPU."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            # Otherwise partially loaded layers would count as loaded in the next reload.
            finalize_layerwise_reload(self.model, self.model_config)
            raise
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def receive_weights(self, update_info: WeightInfo) -> None:
        """Receive and load the tensors that ``update_info`` lists."""
        if self._group is None:
            raise RuntimeError("this worker has not joined a group; call init_weight_transfer_engine first")
        for bucket in _buckets(update_info):
            ends = [0]
            for _, dtype, shape in bucket:
                ends.append(ends[-1] + -(-prod(shape) * dtype.itemsize // _ALIGN) * _ALIGN)
            memory = torch.empty(max(ends[-1], _ALIGN), dtype=torch.uint8, device=self.device)
            self._group.broadcast([memory], dist.BroadcastOptions()).wait()
            self.model.load_weights(
                [
                    (name, memory[at : at + prod(shape) * dtype.itemsize].view(dtype).view(shape))
                    for at, (name, dtype, shape) in zip(ends, bucket, strict=False)
                ]
            )

    def finish_weight_update(self) -> None:
        """Finish the update. After this call, the model can run forward passes with the new weights."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave the group."""
        self._group = None


def _buckets(info: WeightInfo) -> Iterator[list[tuple[str, torch.dtype, list[int]]]]:
    bucket: list[tuple[str, torch.dtype, list[int]]] = []
    held = 0
    for name, dtype_name, shape in zip(info.names, info.dtypes, info.shapes, strict=True):
        dtype = getattr(torch, dtype_name)
        nbytes = prod(shape) * dtype.itemsize
        if bucket and held + nbytes > info.bucket_bytes:
            yield bucket
            bucket, held = [], 0
        bucket.append((name, dtype, shape))
        held += nbytes
    if bucket:
        yield bucket


def _own_address(other: str) -> str:
    """Return the address of this machine on the route to another machine. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))
        return str(probe.getsockname()[0])
