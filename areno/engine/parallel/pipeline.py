"""Pipeline parallelism: each stage holds some of the layers, and microbatches pass from stage to stage.

All stages know all microbatches, so shapes are never communicated. Microbatches may differ in length. Each stage sends hidden
states to the next stage and gradients to the previous stage. Sends are asynchronous, so the sender continues with its
schedule. The last stage computes the predictions and the loss.

areno does not use the package ``torch.distributed.pipelining``, because that package needs microbatches of one shape. The
package also requires a default process group that contains all stages. In areno, a rank's default process group contains ranks
of only one stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from areno.engine.cpu_threads import CPU_THREADS
from areno.engine.heartbeat import HEARTBEAT
from areno.engine.model.attention import AttentionPlan
from areno.engine.model.packed_model import PackedModel
from areno.engine.parallel.rank_context import RankContext
from areno.engine.parallel.schedule import Action, Schedule, make_schedule, needed


class Microbatch(Protocol):
    """The data that each stage needs from a microbatch."""

    @property
    def tokens(self) -> Tensor:
        """This rank's token ids [T]."""

    @property
    def plan(self) -> AttentionPlan:
        """The plan that determines which tokens attend to each other."""


Finish = Callable[[int, Tensor], tuple[Tensor, Tensor | None] | None]
"""A function that the last stage calls with the index and the final hidden states [T, C] of a microbatch.

The function returns the output at which the backward pass starts, and the gradient of this output. If the output is a scalar
loss, the gradient is None. Without a backward pass, the return value is ignored.
"""


@dataclass(slots=True)
class _Saved:
    """The tensors that a forward pass saves for its backward pass."""

    input: Tensor
    output: Tensor
    gradient: Tensor | None = None  # gradient of the output, on the last stage


class Pipeline:
    """Runs the forward and backward passes of one rank. All ranks of all stages must make the same calls."""

    def __init__(self, model: PackedModel, peers: RankContext) -> None:
        assert model.stage is not None
        self.model, self.peers, self.layers = model, peers, model.stage
        self.stage = peers.place.stage
        self._width = int(model.config.get_text_config().hidden_size)

    def run(self, batches: Sequence[Microbatch], finish: Finish, backward: bool) -> None:
        """Run the forward pass of all microbatches through all stages. With ``backward``, also run the backward pass."""
        layout = self.peers.layout
        schedule = make_schedule(layout.pp_size, layout.pp_chunks, len(batches), backward)
        traffic = _Traffic(self, schedule, [len(batch.tokens) for batch in batches])
        saved: dict[Action, _Saved] = {}
        for action in schedule[self.stage]:
            HEARTBEAT.tick()
            CPU_THREADS.apply()
            if action.backward:
                self._backward(action, saved.pop(action._replace(backward=False)), traffic)
            else:
                result = self._forward(action, batches[action.microbatch], traffic, finish, backward)
                if backward:
                    saved[action] = result
        traffic.finish()

    def _forward(self, action: Action, batch: Microbatch, traffic: _Traffic, finish: Finish, backward: bool) -> _Saved:
        _, run, index = action
        input = batch.tokens if run == 0 else traffic.take(action)
        if backward and run > 0:
            input.requires_grad_()
        is_last, gradient = run == self.layers.last_run, None

        def work() -> Tensor:
            nonlocal gradient
            hidden = self.model.body(input, batch.plan.position_ids, batch.plan, run)
            if not is_last:
                return hidden.clone() if hidden._is_view() else hidden  # FSDP warns about views
            finished = finish(index, hidden)
            output, gradient = finished if finished is not None else (hidden, None)
            return output

        with torch.set_grad_enabled(backward):
            output = self.model.weights.run(work)
        if not is_last:
            traffic.send(action, output.detach())
        return _Saved(input, output, gradient)

    def _backward(self, action: Action, saved: _Saved, traffic: _Traffic) -> None:
        gradient = saved.gradient if action.run == self.layers.last_run else traffic.take(action)
        if saved.output.requires_grad:
            torch.autograd.backward(saved.output, gradient)
        if action.run > 0:
            gradient = saved.input.grad
            traffic.send(action, torch.zeros_like(saved.input) if gradient is None else gradient)

    def empty(self, length: int) -> Tensor:
        """Allocate a buffer for hidden states [length, C] or their gradients."""
        return torch.empty(length, self._width, dtype=self.model.dtype, device=self.model.device)


@dataclass(slots=True, eq=False)
class _Sent:
    """A pending send of ``values`` to another ``stage``.

    The receiving stage uses the values in a forward or backward pass. ``taken_by`` is the index of this pass in the schedule
    of the receiving stage.
    """

    stage: int
    taken_by: int
    work: dist.Work
    values: Tensor


@dataclass(slots=True)
class _Inbox:
    """Tensors that another stage sends to this stage over one link, in order."""

    link: Any
    stage: int
    coming: deque[Action]  # actions of the sender whose values have not been requested yet
    arrived: dict[Action, Tensor] = field(default_factory=dict)
    next: tuple[Action, Tensor, dist.Work] | None = None


class _Traffic:
    """Exchanges hidden states and gradients with the other stages during one pass over all microbatches."""

    def __init__(self, pipeline: Pipeline, schedule: Schedule, lengths: Sequence[int]) -> None:
        self._pipeline, self._lengths = pipeline, lengths
        self._stages, self._last = len(schedule), pipeline.layers.last_run
        self._numbers = [{action: number for number, action in enumerate(actions)} for actions in schedule]
        self._sent: list[_Sent] = []
        self._inboxes: dict[bool, _Inbox] = {}
        for (gradients, sender), link in pipeline.peers.links.items():
            if link.rank == 1:
                coming = (a for a in schedule[sender] if a.backward == gradients and self._goes_out(a))
                self._inboxes[gradients] = _Inbox(link, sender, deque(coming))
        for inbox in self._inboxes.values():
            self._expect(inbox)

    def _goes_out(self, action: Action) -> bool:
        """Whether another stage needs the result of a forward or backward pass."""
        return action.run > 0 if action.backward else action.run < self._last

    def _expect(self, inbox: _Inbox) -> None:
        """Start receiving the next tensor before a forward or backward pass needs it."""
        inbox.next = None
        if inbox.coming:
            action = inbox.coming.popleft()
            room = self._pipeline.empty(self._lengths[action.microbatch])
            inbox.next = action, room, inbox.link.receive(room, 0)

    def take(self, action: Action) -> Tensor:
        """Wait for the input that a forward or backward pass needs from another stage, and return it."""
        source = needed(action, self._last)
        assert source is not None
        inbox = self._inboxes[action.backward]
        while source not in inbox.arrived:
            assert inbox.next is not None
            sender, values, work = inbox.next
            work.wait()
            inbox.arrived[sender] = values
            self._forget(inbox.stage, self._numbers[inbox.stage][sender])
            self._expect(inbox)
        return inbox.arrived.pop(source)

    def _forget(self, stage: int, number: int) -> None:
        """Discard completed sends to stage ``stage``.

        ``number`` is the index of a pass that the stage has run. The stage runs its passes in the order of their indices. It
        has therefore received the inputs of all passes with smaller indices, so the sends of these inputs are complete.
        """
        arrived = [sent for sent in self._sent if sent.stage == stage and sent.taken_by < number]
        for sent in arrived:
            sent.work.wait()
        self._sent = [sent for sent in self._sent if sent not in arrived]

    def send(self, action: Action, values: Tensor) -> None:
        """Send the result of a forward or backward pass to the stage that needs it."""
        own = self._pipeline.stage
        receiver = Action(action.backward, action.run + (-1 if action.backward else 1), action.microbatch)
        stage = receiver.run % self._stages
        values = values.to(self._pipeline.model.dtype).contiguous()
        work = self._pipeline.peers.links[action.backward, own].send(values, 1)
        self._sent.append(_Sent(stage, self._numbers[stage][receiver], work, values))

    def finish(self) -> None:
        for sent in self._sent:
            sent.work.wait()
        self._sent.clear()
