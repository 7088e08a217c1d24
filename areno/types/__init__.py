"""Data classes shared by all packages. This package does not import PyTorch."""

from areno.types.reward import RewardEvent, RewardEventType, RewardRecord
from areno.types.reward_parts import PARTS, RewardParts, WeightedReward, part_columns, parts_of
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
from areno.types.training import ModelRole, PromptBatch, PromptItem, TokenRecord, TrainSequence

__all__ = [
    "PARTS",
    "FinishReason",
    "GeneratedToken",
    "Logprobs",
    "ModelRole",
    "PromptBatch",
    "PromptItem",
    "Request",
    "RewardEvent",
    "RewardEventType",
    "RewardParts",
    "RewardRecord",
    "RolloutResult",
    "RolloutSequence",
    "SamplingParams",
    "TokenConstraint",
    "TokenRecord",
    "TrainSequence",
    "WeightedReward",
    "part_columns",
    "parts_of",
    "tightest",
]
