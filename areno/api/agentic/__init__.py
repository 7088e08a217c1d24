"""Agents: the data that an agent program receives, and the policy of which of its tokens are trained on."""

from areno.api.agentic.data import AgentBatch, AgentItem, LossMaskPolicy
from areno.api.session import RolloutSession
from areno.types import RewardEvent, RewardRecord

__all__ = ["AgentBatch", "AgentItem", "LossMaskPolicy", "RewardEvent", "RewardRecord", "RolloutSession"]
