"""Records the conversations of agents, with the exact tokens that the engine received and sampled.

A recorder belongs to one API key. It stores each request with its answer as a turn, and these turns form trees. A request that
extends an answered turn becomes a child of this turn, and adds only new tokens. Any other request starts a new tree. Each path
from a root to a leaf becomes training rows (see :mod:`areno.rollouts.conversation.trajectory_rows`). Several server threads use
a recorder, so a lock guards its changes.
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from areno.engine.rollout.counter_rng import derive_seed
from areno.observability.session_tracer import current_session
from areno.rollouts.conversation.continuation import Forked, ForkReason, Turn, continue_turn
from areno.rollouts.conversation.history import call_ids, next_key, prefix_keys, same_answer
from areno.serving.recording import ChatPrompt, RecordedSample
from areno.text.chat import encode_rendered

_HASH_BITS = (1 << 63) - 1


class ConversationRecorder:
    """Records the conversations of one API key. Implements :class:`areno.serving.recording.SessionRecorder`.

    The seeds of requests are derived from ``seed``. The requests are traced in ``session``, which is the tracing session that
    was active when the recorder was created.
    """

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self.turns: list[Turn] = []
        self.session = current_session()
        self._tokenizer, self._seed = tokenizer, seed
        self._lock = threading.Lock()
        self._answered: dict[int, list[Turn]] = {}  # answered turns by the key of their messages, including the answer
        self._openings: set[int] = set()  # keys of requests up to their first user message
        self._prefixes: set[int] = set()  # keys of all prefixes of requests
        self._by_id: dict[str, Turn] = {}
        self._draws: Counter[int] = Counter()  # number of samples per prompt

    def open(self, prompt: ChatPrompt) -> _OpenTurn:
        """Start a request: find the turn that the request continues, and determine the prompt tokens."""
        with self._lock:
            return _OpenTurn(self, self._begin(prompt))

    def _begin(self, prompt: ChatPrompt) -> Turn:
        fork: ForkReason | None = None
        keys = prefix_keys(prompt.messages)
        for known, length in self._candidates(prompt.messages, keys):
            try:
                begun = continue_turn(self._tokenizer, known, prompt.messages[length:], prompt.render)
            except Forked as forked:
                fork = fork or forked.reason
                continue
            begun.tools, begun.keys, begun.fork = prompt.tools, keys, self._edited(begun.messages, keys, length)
            return begun
        fork = fork or self._edited(prompt.messages, keys, 0)
        rendered = prompt.render(prompt.messages, True)
        tokens = encode_rendered(self._tokenizer, [rendered])[0]
        return Turn(
            "", None, tokens, rendered.text, "", rendered.text, prompt.messages, prompt.tools, fork=fork, keys=keys
        )

    def _candidates(self, messages: Sequence[Mapping[str, Any]], keys: list[int]) -> list[tuple[Turn, int]]:
        """Return the recorded turns that a request may continue, likeliest first.

        The function searches ``messages`` for the last answer that is recorded, and returns the turns with this answer. Several
        turns can have the same answer. Each turn is paired with the number of ``messages`` up to and including the answer.
        """
        for length in range(len(messages), 0, -1):
            last = messages[length - 1]
            known = self._answered.get(keys[length - 1], []) if last["role"] == "assistant" else []
            known = [turn for turn in known if same_answer(turn.answer, last)]
            if known:
                ids = call_ids(last)
                known.sort(key=lambda turn: (call_ids(turn.answer) != ids, turn.extended))
                return [(turn, length) for turn in known]
        return []

    def _edited(self, messages: Sequence[Mapping[str, Any]], keys: list[int], known: int) -> ForkReason | None:
        pairs = zip(keys[known:], messages[known:], strict=True)
        answers = [key for key, message in pairs if message["role"] == "assistant"]
        began = keys[_opening(messages)] in self._openings
        return "edited" if began and not self._prefixes.issuperset(answers) else None

    def seeds(self, prompt: Sequence[int], samples: int) -> list[int]:
        """Return one seed per sample of a prompt. The k-th request with a given prompt gets the same seeds in every run."""
        with self._lock:
            key = hash(tuple(prompt)) & _HASH_BITS
            first = self._draws[key]
            self._draws[key] += samples
            return [derive_seed(self._seed, key, first + index) for index in range(samples)]

    def find(self, turn_id: str | None) -> Turn | None:
        """Return the recorded turn with this id. None if the recorder has no such turn."""
        return self._by_id.get(turn_id or "")

    def set_reward(self, reward: float, response_id: str | None = None) -> None:
        """Set the reward of answers.

        With ``response_id``, the answers with this response id or turn id get the reward. Otherwise, the latest answer that has
        tokens gets the reward.

        Raises:
            ValueError: the session has no such answer.
        """
        with self._lock:
            name = (response_id or "").removeprefix("chatcmpl-").removeprefix("resp_").removeprefix("msg_")
            if response_id is None:
                turns = [turn for turn in self.turns if turn.tokens][-1:]
            else:
                turns = [turn for turn in self.turns if name in (turn.id, turn.response_id)]
            if not turns:
                latest = ", ".join(turn.response_id for turn in self.turns[-3:]) or "none"
                which = "with tokens" if response_id is None else f"with the id {response_id!r}"
                raise ValueError(f"this session has no answer {which}; the ids of the latest answers are: {latest}")
            for turn in turns:
                turn.reward = reward

    def keep(self, begun: Turn, answer: RecordedSample) -> Turn:
        """Record the complete answer of a started turn, and return the recorded turn."""
        turn = replace(
            begun,
            id=secrets.token_hex(12),
            answer=answer.message,
            tokens=[token.token for token in answer.tokens],
            logprobs=[token.logprob for token in answer.tokens],
            versions=[token.version for token in answer.tokens],
            forced=[token.forced for token in answer.tokens] if any(token.forced for token in answer.tokens) else [],
            routed_experts=answer.tokens[-1].routed_experts if answer.tokens else None,
            cut_mass=sum(token.cut_mass for token in answer.tokens) / max(len(answer.tokens), 1),
            finish=answer.finish,
            by_token=answer.by_token,
            temperature=answer.temperature,
            text=answer.text,
            offsets=list(answer.offsets),
            pieces=list(answer.pieces),
            closer=answer.closer,
            response_id=answer.response_id,
        )
        with self._lock:
            self.turns.append(turn)
            self._by_id[turn.id] = turn
            if turn.parent is not None:
                turn.parent.extended = True
            self._openings.add(turn.keys[_opening(turn.messages)])
            self._prefixes.update(turn.keys)
            if turn.tokens:
                self._answered.setdefault(next_key(turn.keys[-1], turn.answer), []).append(turn)
        return turn


def _opening(messages: Sequence[Mapping[str, Any]]) -> int:
    return next((index for index, message in enumerate(messages) if message["role"] == "user"), 0)


class _OpenTurn:
    """Implements :class:`areno.serving.recording.OpenTurn`."""

    def __init__(self, recorder: ConversationRecorder, begun: Turn) -> None:
        self._recorder, self._begun = recorder, begun
        self.prompt_tokens, self.prompt_text = begun.prompt, begun.prompt_text

    def seeds(self, samples: int) -> list[int]:
        return self._recorder.seeds(self.prompt_tokens, samples)

    def end(self, answer: RecordedSample) -> dict[str, Any]:
        turn = self._recorder.keep(self._begun, answer)
        return {
            "turn": turn.id,
            "input_tokens": self.prompt_tokens,
            "response_tokens": turn.tokens,
            "response_logprobs": turn.logprobs,
            "versions": turn.versions,
            "temperature": turn.temperature,
        }
