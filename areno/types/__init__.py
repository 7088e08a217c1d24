"""The data classes that travel through areno. Nothing here imports torch."""

from areno.types.reward import RewardEvent, RewardEventType, RewardRecord
from areno.types.sampling import FinishReason, Request, RolloutResult, RolloutSequence, SamplingParams
from areno.types.training import ModelRole, PromptBatch, PromptItem, TrainSequence

__all__ = [
    "FinishReason",
    "ModelRole",
    "PromptBatch",
    "PromptItem",
    "Request",
    "RewardEvent",
    "RewardEventType",
    "RewardRecord",
    "RolloutResult",
    "RolloutSequence",
    "SamplingParams",
    "TrainSequence",
]
