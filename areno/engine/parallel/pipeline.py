"""Pipeline parallelism: each stage has some layers, and microbatches pass from stage to stage.

All stages know all microbatches, so shapes need no talk: hidden states go on to the next stage, and their gradients back, as
soon as they are there, while the sender computes what is next in its schedule. Microbatches need not be of one length. The
last stage computes what is predicted, and the loss.

The schedule is our own, not ``torch.distributed.pipelining``: that one takes microbatches of one shape only, and its process
group must be part of the default one, which here is a stage.
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
from areno.engine.parallel.peers import Peers
from areno.engine.parallel.schedule import Action, Schedule, make_schedule, needed


class Microbatch(Protocol):
    """What each stage needs of a microbatch."""

    @property
    def tokens(self) -> Tensor:
        """Those of this rank [T]."""

    @property
    def plan(self) -> Plan:
        """Attention over them."""


class Plan(AttentionPlan, Protocol):
    """An attention plan that says where its tokens stand."""

    position_ids: Tensor


Finish = Callable[[int, Tensor], tuple[Tensor, Tensor | None] | None]
"""Of the last stage: makes of a microbatch's number and hidden states [T, C] a tensor to differentiate and its gradient."""


@dataclass(slots=True)
class _Kept:
    """What a forward pass leaves for its backward pass."""

    given: Tensor
    result: Tensor
    gradient: Tensor | None = None  # of the result, where this is the last stage


class Pipeline:
    """One rank's side of it. Every rank of a stage, and every stage, must make the same calls."""

    def __init__(self, model: PackedModel, peers: Peers) -> None:
        assert model.stage is not None
        self.model, self.peers, self.layers = model, peers, model.stage
        self.stage = peers.place.stage
        self._width = int(model.config.get_text_config().hidden_size)

    def run(self, batches: Sequence[Microbatch], finish: Finish, backward: bool) -> None:
        """Pass microbatches through all stages, and with ``backward`` their gradients back.

        ``finish`` is what the last stage does with hidden states; with ``backward`` it returns something to differentiate.
        """
        layout = self.peers.layout
        schedule = make_schedule(layout.pp_size, layout.pp_chunks, len(batches), backward)
        traffic = _Traffic(self, schedule, [len(batch.tokens) for batch in batches])
        kept: dict[Action, _Kept] = {}
        for action in schedule[self.stage]:
            HEARTBEAT.tick()
            CPU_THREADS.apply()
            if action.backward:
                self._backward(action, kept.pop(action._replace(backward=False)), traffic)
            else:
                found = self._forward(action, batches[action.microbatch], traffic, finish, backward)
                if backward:
                    kept[action] = found
        traffic.finish()

    def _forward(self, action: Action, batch: Microbatch, traffic: _Traffic, finish: Finish, backward: bool) -> _Kept:
        _, run, index = action
        given = batch.tokens if run == 0 else traffic.take(action)
        if backward and run > 0:
            given.requires_grad_()
        is_last, gradient = run == self.layers.last_run, None

        def work() -> Tensor:
            nonlocal gradient
            hidden = self.model.body(given, batch.plan.position_ids, batch.plan, run)
            if not is_last:
                return hidden.clone() if hidden._is_view() else hidden  # FSDP warns of views
            found = finish(index, hidden)
            result, gradient = found if found is not None else (hidden, None)
            return result

        with torch.set_grad_enabled(backward):
            result = self.model.weights.run(work)
        if not is_last:
            traffic.send(action, result.detach())
        return _Kept(given, result, gradient)

    def _backward(self, action: Action, kept: _Kept, traffic: _Traffic) -> None:
        gradient = kept.gradient if action.run == self.layers.last_run else traffic.take(action)
        if kept.result.requires_grad:
            torch.autograd.backward(kept.result, gradient)
        if action.run > 0:
            found = kept.given.grad
            traffic.send(action, torch.zeros_like(kept.given) if found is None else found)

    def empty(self, length: int) -> Tensor:
        """Room for hidden states [length, C] or their gradients."""
        return torch.empty(length, self._width, dtype=self.model.dtype, device=self.model.device)


@dataclass(slots=True, eq=False)
class _Sent:
    """What is on its way: to which stage, and the number of the action there that takes it."""

    stage: int
    taken_by: int
    work: dist.Work
    values: Tensor


@dataclass(slots=True)
class _Inbox:
    """What one stage sends here over one link, in the order in which it does."""

    link: Any
    stage: int
    coming: deque[Action]  # of the sender
    arrived: dict[Action, Tensor] = field(default_factory=dict)
    next: tuple[Action, Tensor, dist.Work] | None = None


class _Traffic:
    """What goes between this stage and its neighbours during one pass over all microbatches."""

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
        """Whether another stage waits for what an action gives."""
        return action.run > 0 if action.backward else action.run < self._last

    def _expect(self, inbox: _Inbox) -> None:
        """Begin to receive what comes next, before it is needed."""
        inbox.next = None
        if inbox.coming:
            action = inbox.coming.popleft()
            room = self._pipeline.empty(self._lengths[action.microbatch])
            inbox.next = action, room, inbox.link.receive(room, 0)

    def take(self, action: Action) -> Tensor:
        """What an action needs from another stage."""
        wanted = needed(action, self._last)
        assert wanted is not None
        inbox = self._inboxes[action.backward]
        while wanted not in inbox.arrived:
            assert inbox.next is not None
            found, room, work = inbox.next
            work.wait()
            inbox.arrived[found] = room
            self._forget(inbox.stage, self._numbers[inbox.stage][found])
            self._expect(inbox)
        return inbox.arrived.pop(wanted)

    def _forget(self, stage: int, number: int) -> None:
        """A stage has got to its action of that number: what it took before has arrived."""
        arrived = [sent for sent in self._sent if sent.stage == stage and sent.taken_by < number]
        for sent in arrived:
            sent.work.wait()
        self._sent = [sent for sent in self._sent if sent not in arrived]

    def send(self, action: Action, values: Tensor) -> None:
        """Send what an action has given to the stage that waits for it."""
        own = self._pipeline.stage
        receiver = Action(action.backward, action.run + (-1 if action.backward else 1), action.microbatch)
        stage = receiver.run % self._stages
        values = values.to(self._pipeline.model.dtype).contiguous()
        work = self._pipeline.peers.links[action.backward, own].send(values, 1)
        self._sent.append(_Sent(stage, self._numbers[stage][receiver], work, values))

    def finish(self) -> None:
        """Wait until everything has arrived."""
        for sent in self._sent:
            sent.work.wait()
        self._sent.clear()
