"""The engine holds a run's models on one device, and generates, scores and trains with these models.

The actor generates text, trains, or does both. Other roles score token rows, and some of these roles also train. Generation and
training use the same module of the actor, so generation needs no weight transfer. ``version`` is the number of optimizer steps
of the actor. Every generated token is labeled with the version of the weights that sampled the token.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from areno.config.paths import base_of, tokenizer_of
from areno.engine.backend import ACTOR, Backend
from areno.engine.cpu_threads import CPU_THREADS
from areno.engine.device import use_deterministic_algorithms, use_device
from areno.engine.engine_config import EngineConfig
from areno.engine.inference import DecodeProgress
from areno.engine.libc_tuning import retain_freed_memory
from areno.engine.limits import check_role_tokenizer, check_tokenizer
from areno.engine.model.adapter import AdapterOptions
from areno.engine.model.causal_lm import CausalLM
from areno.engine.model.loading import LoadOptions
from areno.engine.model.recurrent import is_recurrent
from areno.engine.model.routers import follow_routers, refuse_without_experts
from areno.engine.plan.gpu_memory import kv_tokens
from areno.engine.role import Role, load_role
from areno.engine.rollout.compiled.switch import DecodeMode
from areno.engine.rollout.load import EngineLoad
from areno.engine.rollout.loop import RolloutLoop
from areno.engine.rollout.paged.loop import PagedRolloutLoop
from areno.engine.rollout.probe import validate_decoding
from areno.engine.scoring import Scored, TokenRows
from areno.engine.train.microbatch import MicroBatching
from areno.engine.train.optimizer import OptimizerOptions
from areno.engine.train.outputs import ModelKind
from areno.errors import EngineError, UsageError
from areno.loss_fns.loss_interface import LossFn
from areno.storage.contents import STATE_FOLDER
from areno.text.chat import eos_token_ids, load_tokenizer
from areno.types import ModelRole, Request, RolloutResult, TokenRecord, TrainSequence
from areno.types.routing import RoutingRecord

logger = logging.getLogger(__name__)

T = TypeVar("T")

NO_REWARD_ROLLOUT = "a reward model cannot generate; to generate, create the trainer with runtime={'trains': 'policy'}"
_OPTIMIZER_FOLDER = "optimizer"
_IDLE_S = 30.0  # after this idle time, a generate-only engine returns freed memory to the system


class Engine(Backend):
    """Holds a run's models on one device. If ``path`` is an adapter, the adapter is merged into its base model."""

    def __init__(self, path: str, config: EngineConfig) -> None:
        self.path, self.config = path, config
        use_device(config.device)
        if config.deterministic:
            use_deterministic_algorithms()
        if config.device.type == "cpu":
            CPU_THREADS.begin()
        self.tokenizer = load_tokenizer(tokenizer_of(path), trust_remote_code=config.trust_remote_code)
        check_tokenizer(self.tokenizer, path, option="--ckpt", trust_remote_code=config.trust_remote_code)
        if config.return_routed_experts:
            refuse_without_experts(path, config.trust_remote_code)
        self.eos_ids = eos_token_ids(self.tokenizer, base_of(path))
        kind: ModelKind = "reward" if config.trains == "reward" else "policy"
        optimizer = None if config.trains == "nothing" else config.optimizer
        self.actor = self._open_role(ACTOR, path, kind, config.load_options(path=path), optimizer, config.adapter)
        if config.return_routed_experts:
            follow_routers(self.actor.model, path, config.peers.pipeline.all_gather)
        if config.device.type == "cpu":
            retain_freed_memory()  # after loading, so that temporary memory is not retained
        self.roles: dict[str, Role] = {ACTOR: self.actor}
        self._resumed: dict[str, Path] = {}  # folders from which `ensure_roles` has loaded roles for `load_state`
        model = self.actor.model
        self._loop = self._rollout_loop(model) if isinstance(model, CausalLM) and model.stage is None else None

    def _rollout_loop(self, model: CausalLM) -> RolloutLoop:
        config = self.config
        with model.gathered():
            cache_shape = validate_decoding(model, self.path)
        if config.speculate:
            self._refuse_speculation(can_roll_back=bool(cache_shape.layers))
        self._token_bytes = cache_shape.bytes_per_token + (model.routers.bytes_per_token if model.routers else 0)
        budget = config.kv_cache_tokens or kv_tokens(config, self.path, self.roles.values(), self._token_bytes)
        logger.debug("loaded %s; its KV cache holds %d tokens of %d bytes each", self.path, budget, self._token_bytes)
        peers, interval = config.peers, config.decode_progress_interval_s
        progress = DecodeProgress(interval, peers.replica, peers.layout.dp_size) if peers.leads else None
        common: dict[str, Any] = {
            "eos_ids": self.eos_ids,
            "tokenizer": self.tokenizer,
            "budget_tokens": budget,
            "max_running": config.max_running,
            "progress": progress,
            "prefix_tokens": budget // 4 if config.prefix_cache_tokens is None else config.prefix_cache_tokens,
            "records": model.routers,
        }
        if config.peers.layout.tp_size > 1:
            from areno.engine.parallel.lockstep import FollowingLoop, LeadingLoop

            kind = LeadingLoop if config.peers.decides else FollowingLoop
            return kind(model, layers=cache_shape.layers, decode_mode="eager", turns=config.peers.turns, **common)
        if config.device.type == "cuda":
            # FSDP gathers weights for each rollout, so their addresses change, which CUDA graphs do not allow.
            eager = config.decode == "eager" or config.peers.layout.fsdp
            return PagedRolloutLoop(model, eager_decode=eager, **common)
        background_build = config.builds_decode and config.peers.replica == 0
        extra: dict[str, Any] = {"speculate": config.speculate, "builds": background_build}
        mode: DecodeMode = "eager" if config.peers.layout.fsdp or config.return_routed_experts else config.decode
        loop = RolloutLoop(model, layers=cache_shape.layers, decode_mode=mode, **extra, **common)
        loop.idle_s = _IDLE_S if config.trains == "nothing" else None
        if config.decode == "compiled" and model.adapter is not None:
            model.adapter.merge()  # the compiled step uses merged weights, and is validated against the model
        loop.decode.prepare()
        return loop

    def _refuse_speculation(self, can_roll_back: bool) -> None:
        option, tp_size = f"--speculate {self.config.speculate}", self.config.peers.layout.tp_size
        if self.config.device.type == "cuda":
            raise UsageError(f"{option}: speculative decoding is not supported on GPUs; use --speculate 0")
        if tp_size > 1:
            raise UsageError(
                f"{option} with --tp-size {tp_size}: speculative decoding does not support tensor parallelism; use --tp-size 1 "
                "or --speculate 0"
            )
        if not can_roll_back:
            raise UsageError(
                f"{option}: the model {self.path} has recurrent states, which cannot be rolled back after a rejected draft; "
                "use --speculate 0"
            )

    @property
    def dp_size(self) -> int:
        """Number of data-parallel replicas, including this engine."""
        return self.config.peers.layout.dp_size

    @property
    def context_length(self) -> int | None:
        """Maximum number of tokens per sequence; None if the actor's configuration states no limit."""
        return self.actor.model.context_length

    @property
    def vocab_size(self) -> int:
        """Number of logits that the actor computes per token."""
        return self.actor.model.vocab_size

    @property
    def kv_tokens(self) -> int:
        """Capacity of the KV cache in tokens; 0 if this engine cannot generate."""
        return self._loop.scheduler.budget_tokens if self._loop is not None else 0

    @property
    def failed(self) -> bool:
        """Whether the rollout loop has failed."""
        return self._loop is not None and self._loop.failure is not None

    def set_max_running(self, sequences: int | None) -> None:
        """Limit concurrent sequences; None means the configured limit. Raises ValueError: the limit is below 1."""
        if sequences is not None and sequences < 1:
            raise ValueError(f"max_running must be at least 1, got {sequences}")
        limit, loop = self.config.max_running if sequences is None else sequences, self.loop
        if isinstance(loop, PagedRolloutLoop):
            loop.make_room(limit)
        loop.set_limits(max_running=limit)

    def enable_prefix_cache(self, enabled: bool) -> None:
        """See :meth:`Backend.enable_prefix_cache`."""
        if self.config.prefix_cache_tokens == 0:
            self.loop.set_limits(prefix_tokens=self.loop.scheduler.budget_tokens // 4 if enabled else 0)

    def learning_rate(self, role: str) -> float:
        """Return the learning rate of a role's next optimizer step."""
        return self.role(role).trained_by().learning_rate

    def set_learning_rate(self, role: str, value: float) -> None:
        """Replace a role's learning-rate schedule with a constant learning rate."""
        self.role(role).trained_by().learning_rate = value

    @property
    def loop(self) -> RolloutLoop:
        """The rollout loop. Raises EngineError: the actor is a reward model, or is split into pipeline stages."""
        if self._loop is None and self.actor.model.stage is not None:
            raise EngineError(
                "pipeline stages cannot generate; use a layout without pipeline parallelism (such as d2 instead of p2), or "
                "use separate rollout replicas"
            )
        if self._loop is None:
            raise EngineError(NO_REWARD_ROLLOUT)
        return self._loop

    @property
    def version(self) -> int:
        """Number of optimizer steps applied to the actor's weights."""
        return self.actor.optimizer.steps if self.actor.optimizer is not None else 0

    def begin_rollout(self) -> None:
        """Gather the actor's sharded weights on every rank. All ranks must call this method.

        :meth:`end_rollout`, :meth:`train`, :meth:`measure` and :meth:`load_state` shard the weights again.
        """
        self.actor.model.weights.gather()

    def submit(self, requests: list[Request]) -> list[Future[RolloutResult]]:
        """Queue the requests; see :meth:`RolloutLoop.submit`.

        If the actor has an adapter that can be merged, the adapter is first merged into the actor's weights.

        Raises EngineError: the weights are sharded, and :meth:`begin_rollout` has not gathered them.
        """
        if not self.actor.model.weights.whole:
            raise EngineError("the weights are sharded, so no rank can generate; call begin_rollout on all ranks first")
        if self.actor.model.adapter is not None:
            self.actor.model.adapter.merge()
        return self.loop.submit(requests)

    def cancel(self, future: Future[RolloutResult]) -> None:
        """Abort the request of ``future``; see :meth:`RolloutLoop.cancel`."""
        self.loop.cancel(future)

    def load(self) -> EngineLoad:
        """Return the current load of the rollout loop."""
        return self.loop.load()

    def end_rollout(self) -> None:
        """Abort unfinished requests, and free the weights that :meth:`begin_rollout` gathered, except this rank's shards.

        Also free the KV cache, except if ``config.keep_rollout_state`` is true.
        """
        self.loop.cancel_all()
        self.free_rollout()

    def free_rollout(self) -> None:
        """Wait until generation has finished. Then free the memory as :meth:`end_rollout` does."""
        self._rest()
        if not self.config.keep_rollout_state:
            self.loop.drop_cache()

    def train(
        self,
        rows: Sequence[TrainSequence],
        loss_fn: LossFn,
        mini_bs: int | MicroBatching,
        accumulation: int | None = None,
        role: str = ACTOR,
    ) -> dict[str, float]:
        """Wait until generation has finished, then train a role on rows; see :meth:`TrainStep.run`."""
        self._rest()
        trainee = self.role(role)
        trainee.check(row.tokens for row in rows)
        stats = trainee.training.run(rows, loss_fn, mini_bs, accumulation)
        self._stamp_version()
        return stats

    def take_token_records(self) -> dict[int, TokenRecord]:
        """Return what training recorded about the tokens of each row since the last call of this method.

        The keys are the values of ``TrainSequence.observed``, which identify the rows.
        """
        return self.actor.training.records.take() if self.actor.trainable else {}

    def run_on_all_ranks(self, function: Callable[..., T], *arguments: Any) -> list[T]:
        """Return ``[function(self, *arguments)]``, because this engine runs on a single rank."""
        return [function(self, *arguments)]

    def measure(
        self, rows: Sequence[TrainSequence], loss_fn: LossFn, mini_bs: int | MicroBatching, role: str = ACTOR
    ) -> dict[str, float]:
        """Wait until generation has finished, then compute a trainable role's loss and statistics without an optimizer step."""
        self._rest()
        trainee = self.role(role)
        trainee.check(row.tokens for row in rows)
        return trainee.training.measure(rows, loss_fn, mini_bs)

    # -- roles -----------------------------------------------------------------------------------------------------

    def ensure_roles(self, roles: Mapping[str, ModelRole], checkpoint: Path | None = None) -> None:
        """Load the roles that are not loaded yet. Frozen roles with the same checkpoint and kind share one set of weights."""
        self.wait_idle()
        automatic = self.config.kv_cache_tokens is None and self.config.device.type == "cuda"
        resized = self._loop if automatic and not roles.keys() <= self.roles.keys() else None
        if resized is not None:
            resized.drop_cache()  # the roles need memory, and the memory for the new cache is measured
        for name, spec in roles.items():
            loaded = self.roles.get(name)
            if loaded is None:
                saved = None if checkpoint is None else checkpoint / name
                self.roles[name] = self._load_role(name, spec, saved if saved is not None and saved.is_dir() else None)
            elif (loaded.path, loaded.kind, loaded.trainable) != (spec.path, spec.predicts, spec.trainable):
                raise EngineError(
                    f"role {name!r} is already loaded from {loaded.path}, but the requested path, kind or trainable setting "
                    f"differs; call drop_role({name!r}) before you load the role again"
                )
        if resized is not None:
            budget = kv_tokens(self.config, self.path, self.roles.values(), self._token_bytes)
            share = resized.prefixes.budget_tokens * budget // resized.scheduler.budget_tokens
            resized.resize(budget, self.config.prefix_cache_tokens or share)

    def _load_role(self, name: str, spec: ModelRole, saved: Path | None) -> Role:
        config = self.config
        options = config.load_options(f"role {name!r}", spec.path)
        if spec.predicts != "policy" and not spec.trainable:
            options = replace(options, dummy=False)  # random scores would be useless
        check_role_tokenizer(self.tokenizer, self.path, name, spec.path, config.trust_remote_code)
        if spec.trainable:
            fields = dict(spec.optimizer or {})
            if spec.optimizer_lr is not None:
                fields["lr"] = spec.optimizer_lr
            optimizer = OptimizerOptions.of(fields, f"ModelRole({name!r}).optimizer")
            if saved is not None:
                self._resumed[name] = saved
                return self._open_saved(name, spec.path, spec.predicts, optimizer, saved)
            return self._open_role(name, spec.path, spec.predicts, options, optimizer, self._new_adapter())
        if self.actor.model.adapter is not None and (spec.path, spec.predicts) == (self.path, self.actor.kind):
            return Role(name, spec.path, spec.predicts, self.actor.model, peers=config.peers, adapter_off=True)
        for other in self.roles.values():
            if not other.trainable and (other.path, other.kind) == (spec.path, spec.predicts):
                return Role(name, other.path, other.kind, other.model, peers=config.peers)
        return self._open_role(name, spec.path, spec.predicts, options, None)

    def _open_role(
        self,
        name: str,
        path: str,
        kind: ModelKind,
        options: LoadOptions,
        optimizer: OptimizerOptions | None,
        adapter: AdapterOptions | None = None,
    ) -> Role:
        config = self.config
        role = load_role(
            *(name, path, kind, options, optimizer, config.activation_checkpointing, adapter),
            offload_activations=config.offload_activations,
        )
        recurrent = any(is_recurrent(module) for module in role.model.module.modules())
        role.tree = config.tree_training and role.trainable and kind != "reward" and not recurrent
        return role

    def _new_adapter(self) -> AdapterOptions | None:
        options, adapter = self.config.adapter, self.actor.model.adapter
        if options is None or adapter is None:
            return None
        return replace(options, adapter_path=None, rank=adapter.rank)

    def drop_role(self, name: str) -> None:
        """Unload a role other than the actor."""
        if self.role(name) is self.actor:
            raise EngineError("the actor cannot be dropped; to unload all models, call close()")
        del self.roles[name]
        self._resumed.pop(name, None)

    def role(self, name: str) -> Role:
        """Return a loaded role. Raises EngineError: no role has this name."""
        if name not in self.roles:
            raise EngineError(
                f"there is no role {name!r} (loaded roles: {', '.join(self.roles)}); load the role with "
                f'trainer.ensure_roles({{"{name}": ModelRole(name="{name}", path=..., trainable=...)}})'
            )
        return self.roles[name]

    def score(
        self,
        what: Scored,
        role: str,
        rows: TokenRows,
        micro_bs: int,
        temperatures: float | Sequence[float] = 1.0,
        routed: Sequence[RoutingRecord | None] | None = None,
    ) -> list[Any]:
        """See :meth:`Backend.score`."""
        self.wait_idle()
        return self.role(role).score(what, rows, micro_bs, temperatures, routed)

    def wait_idle(self) -> None:
        """Wait until generation has finished, then unmerge the adapter."""
        if self._loop is not None:
            self._loop.wait_idle()
        if self.actor.model.adapter is not None:
            self.actor.model.adapter.unmerge()
            if self._loop is not None:
                self._loop.follow_weights()

    def _rest(self) -> None:
        """Wait until generation has finished. Then free the gathered weights, except this rank's shards."""
        self.wait_idle()
        self.actor.model.weights.release()

    def _stamp_version(self) -> None:
        if self._loop is not None:
            self._loop.weights_changed(self.version)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def checkpoint_bytes(self) -> int:
        """Return the approximate size in bytes of a checkpoint that contains the state of all trainable roles."""
        return sum(role.checkpoint_bytes() for role in self.roles.values() if role.trainable)

    def save_model(self, folder: str | Path, role: str = ACTOR) -> None:
        """Write a role's weights, configuration and tokenizer in Hugging Face format."""
        self.role(role).save_model(folder, self.tokenizer)

    def save_state(self, checkpoint: Path) -> None:
        """Write the optimizer states of all trainable roles, and the models of all trainable roles other than the actor.

        The actor's optimizer state is written to ``trainer_state/optimizer/``. A critic's optimizer state is written to
        ``trainer_state/critic_optimizer/``. The critic's model is written to ``critic/`` in Hugging Face format.
        """
        target = checkpoint / STATE_FOLDER
        target.mkdir(exist_ok=True)  # another rank may have created it
        for name, role in self.roles.items():
            if role.trainable:
                role.save_optimizer(target / _optimizer_folder(name))
                if role is not self.actor:
                    role.save_model(checkpoint / name, self.tokenizer)

    def load_state(self, checkpoint: Path) -> None:
        """Restore the state that :meth:`save_state` wrote. The actor's weights must already be those of the checkpoint.

        Call :meth:`ensure_roles` first, because only loaded roles are restored. The weights of trainable roles other than the
        actor are also restored, unless :meth:`ensure_roles` has just loaded these weights from the same checkpoint.
        """
        self._rest()
        for name, role in list(self.roles.items()):
            if role.trainable:
                saved = checkpoint / name
                if role is not self.actor and self._resumed.pop(name, None) != saved:
                    settings, recompute = role.trained_by().config, role.activation_checkpointing
                    role = self.roles[name] = self._open_saved(name, role.path, role.kind, settings, saved)
                    role.set_recomputation(recompute)
                role.load_optimizer(checkpoint / STATE_FOLDER / _optimizer_folder(name))
        self._stamp_version()

    def _open_saved(self, name: str, path: str, kind: ModelKind, optimizer: OptimizerOptions, folder: Path) -> Role:
        """Load a trainable role from a checkpoint.

        ``path`` is the model with which training began. ``folder`` contains the role's saved weights or saved adapter.
        """
        source, adapter = str(folder), self._new_adapter()
        if adapter is not None:
            source, adapter = path, replace(adapter, adapter_path=str(folder))
        options = self.config.load_options(f"role {name!r}", source)
        role = self._open_role(name, source, kind, options, optimizer, adapter)
        role.path = path
        return role

    def close(self) -> None:
        """Stop the rollout thread, and free the KV cache."""
        if self._loop is not None:
            self._loop.close()


def _optimizer_folder(role: str) -> str:
    return _OPTIMIZER_FOLDER if role == ACTOR else f"{role}_{_OPTIMIZER_FOLDER}"
