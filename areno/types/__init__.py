"""The data classes that travel through areno. Nothing here imports torch."""

from areno.types.reward import RewardEvent, RewardEventType, RewardRecord
from areno.types.sampling import (
    FinishReason,
    GeneratedToken,
    Request,
    RolloutResult,
    RolloutSequence,
    SamplingParams,
    TokenConstraint,
)
from areno.types.training import ModelRole, PromptBatch, PromptItem, TrainSequence

__all__ = [
    "FinishReason",
    "GeneratedToken",
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
    "TokenConstraint",
    "TrainSequence",
]
