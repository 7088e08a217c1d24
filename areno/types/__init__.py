"""The data classes that travel through areno. Nothing here imports torch."""

from areno.types.reward import RewardEvent, RewardEventType, RewardRecord
from areno.types.sampling import (
    FinishReason,
    GeneratedToken,
    Logprobs,
    Request,
    RolloutResult,
    RolloutSequence,
    SamplingParams,
    TokenConstraint,
    tightest,
)
from areno.types.training import ModelRole, PromptBatch, PromptItem, TrainSequence

__all__ = [
    "FinishReason",
    "GeneratedToken",
    "Logprobs",
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
    "tightest",
]
