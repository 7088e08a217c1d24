"""A real model on this machine: steps, rollout and memory of areno, an older commit of it, TRL, `generate` and llama.cpp.

    python benchmarks/real_model.py --ckpt FOLDER --data train.jsonl           # everything; hours for 135 M parameters
    python benchmarks/real_model.py gspo rollout --ckpt FOLDER --against COMMIT
    python benchmarks/real_model.py --ckpt FOLDER --save NAME --minutes 9      # a part; the same command continues
    python benchmarks/real_model.py grpo --sides areno trl --steps 2 --ckpt FOLDER --set mini_bs=8

Each side runs in fresh processes, interleaved with the other sides, on the same rows, with the same threads and precision.
With ``--save``, the result of every process is saved as soon as it ends, and a process whose result is there with the same
settings and code is not run again. The last line of output is the result as JSON; benchmarks/README.md explains its fields.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import PEERS, ROOT, WorkerFailedError, git, machine, run_worker
from real_parts import PARTS, SIDES, Part, Workload
from real_report import check, probe, show, summarize
from real_rows import encode, lengthen, read_rows
from train_step import REWARD

WORKERS = ROOT / "benchmarks" / "workers"
RESULTS = ROOT / "benchmarks" / "results"
# Keeps PyTorch from using AVX-512: in its own kernels, oneDNN's, MKL's.
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; what cannot be measured is refused before anything runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: all; {', '.join(PARTS)}")
    parser.add_argument("--ckpt", required=True, help="folder of a model with gated MLPs, such as Llama or Qwen")
    parser.add_argument(
        "--data", type=Path, help="JSONL with prompt and response, or GSM8K's; default: made arithmetic"
    )
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), help="default: all of a part that can run here")
    parser.add_argument("--against", metavar="COMMIT", help="also measure areno as it was then")
    parser.add_argument(
        "--gguf", type=Path, help="the model for llama.cpp; default: written as areno export --gguf does"
    )
    parser.add_argument("--python", nargs="+", default=[], metavar="PEER=PATH", help="interpreters of trl, llama, vllm")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="OPTION=VALUE", help="options of areno train, for our side"
    )
    parser.add_argument(
        "--decode", choices=["compiled", "eager"], default="compiled", help="areno's, in training steps"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--avx2", action="store_true", help="keep PyTorch from AVX-512")
    parser.add_argument("--prompts", type=int, help="of a step or pass; default: the part's own, as of the next three")
    parser.add_argument("--samples", type=int, help="of each prompt")
    parser.add_argument("--new-tokens", type=int, help="of each sample")
    parser.add_argument("--prompt-tokens", type=int, help="make prompts so long")
    parser.add_argument("--steps", type=int, default=3, help="of a process; the first --warmup do not count")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--passes", type=int, default=2, help="timed passes of a rollout, after the first")
    parser.add_argument("--repeats", type=int, default=2, help="processes of each side")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--minutes", type=float, help="begin no process that would last longer than this from the start"
    )
    parser.add_argument(
        "--save", default="", help="name of a file under benchmarks/results, to go on with if it is there"
    )
    args = parser.parse_args(argv)
    args.parts = args.parts or list(PARTS)
    if unknown := [name for name in args.parts if name not in PARTS]:
        parser.error(f"no part is called {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if not (Path(args.ckpt) / "config.json").is_file():
        parser.error(f"--ckpt {args.ckpt}: no config.json there; give the folder of a checkpoint")
    args.ckpt = str(Path(args.ckpt).resolve())
    for option in ("data", "gguf"):
        if (path := getattr(args, option)) and not path.is_file():
            parser.error(f"--{option} {path}: no such file")
    for option in ("prompts", "samples", "new_tokens", "prompt_tokens", "warmup", "passes", "repeats", "threads"):
        if (number := getattr(args, option)) is not None and number < 1:
            parser.error(f"--{option.replace('_', '-')} {number}: at least 1")
    if args.steps <= args.warmup:
        parser.error(f"--steps {args.steps}: more than --warmup {args.warmup}, or no step counts")
    for option in ("python", "set"):
        if wrong := [pair for pair in getattr(args, option) if "=" not in pair]:
            parser.error(f"--{option} {wrong[0]}: write it as NAME=VALUE")
    args.python = dict(pair.split("=", 1) for pair in args.python)
    args.set = {name: _value(text) for name, text in (pair.split("=", 1) for pair in args.set)}
    if args.against and not git("rev-parse", "--verify", "--quiet", f"{args.against}^{{commit}}"):
        parser.error(f"--against {args.against}: git knows no such commit here")
    return args


def _value(text: str) -> Any:
    """A number, true, false or null as in JSON; anything else is text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def source_tree(commit: str) -> Path:
    """The repository as it was at a commit, under .peers."""
    folder = PEERS / "commits" / git("rev-parse", "--short=12", f"{commit}^{{commit}}")
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as building:
            archive = Path(building) / "tree.tar"
            git("archive", f"--output={archive}", commit)
            (tree := Path(building) / "tree").mkdir()
            shutil.unpack_archive(archive, tree)
            tree.rename(folder)
    return folder


def code_of(tree: Path, commit: str) -> str:
    """Identifier of a side's areno sources: their id in git, and whether they have uncommitted changes."""
    changed = tree == ROOT and git("status", "--porcelain", "--", "areno")
    return git("rev-parse", "--short=12", f"{commit}:areno") + ("-dirty" if changed else "")


class Bench:
    """One run of this program.

    Args:
        args: the command line.
        folder: temporary folder for rows, models and runs.
    """

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        import limits
        from transformers import AutoConfig, AutoTokenizer

        self.args, self.folder, self.began = args, folder, time.monotonic()
        self.trees = {"here": ROOT, **({"against": source_tree(args.against)} if args.against else {})}
        self.tokenizer = AutoTokenizer.from_pretrained(args.ckpt)
        self.shape = limits.shape_of(AutoConfig.from_pretrained(args.ckpt))
        self.file = RESULTS / f"{args.save}.json" if args.save else None
        self.result: dict[str, Any] = {"benchmark": "real_model", "runs": []}
        if self.file and self.file.exists():
            self.result = json.loads(self.file.read_text())
        self.result |= {"machine": machine() | {"instructions": instructions()}, "absent": {}}
        self.result["model"] = {"name": Path(args.ckpt).resolve().name, **vars(self.shape)}

    def workload(self, part: Part) -> Workload:
        """The part's workload, with the command line's changes; rows of SFT keep their one sample and its answer."""
        names = (
            ("prompts", "prompt_tokens")
            if part.algo == "sft"
            else ("prompts", "prompt_tokens", "samples", "new_tokens")
        )
        changes = {name: getattr(self.args, name) for name in names}
        return part.workload.changed({name: value for name, value in changes.items() if value is not None})

    def sides(self, name: str) -> list[str]:
        """The requested sides of a part that can run; the limit is always requested."""
        chosen = []
        for side in PARTS[name].sides:
            if self.args.sides and side not in ("limit", *self.args.sides):
                continue
            if reason := SIDES[side].missing(self.args):
                self.result["absent"][f"{name}/{side}"] = reason
                print(f"{name}: {side} is absent: {reason}")
            else:
                chosen.append(side)
        return chosen

    def descriptor(self, name: str, side: str, repeat: int) -> dict[str, Any]:
        """Everything that a process's figures depend on, except the machine."""
        args, program = self.args, SIDES[side]
        described = {
            "part": name,
            "side": side,
            "repeat": repeat,
            "workload": vars(self.workload(PARTS[name])),
            "model": self.result["model"],
            "data": args.data.name if args.data else "arithmetic",
            **{key: getattr(args, key) for key in ("dtype", "threads", "avx2")},
        }
        if side != "limit":
            described |= {"steps": args.steps, "warmup": args.warmup} if PARTS[name].trains else {"passes": args.passes}
        if tree := self.trees.get(program.tree):
            described["code"] = code_of(tree, args.against if program.tree == "against" else "HEAD")
            described |= {"decode": args.decode} if PARTS[name].trains else {}
            described |= {"options": args.set} if program.tree == "here" and PARTS[name].trains else {}
        return described

    def rows(self, name: str) -> tuple[Path, dict[str, Any]]:
        """The folder with the rows of a part, and their lengths in tokens."""
        part, work = PARTS[name], self.workload(PARTS[name])
        groups = self.args.steps if part.trains else self.args.passes + 2
        rows = read_rows(self.args.data, work.prompts * groups)
        if work.prompt_tokens:
            rows = lengthen(self.tokenizer, rows, work.prompt_tokens)
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (folder / "reward.py").write_text(REWARD)
        ids = [encode(self.tokenizer, row["prompt"]) for row in rows]
        passes = [ids[start : start + work.prompts] for start in range(0, len(ids), work.prompts)]
        (folder / "prompts.json").write_text(json.dumps(passes))
        answers = [len(self.tokenizer(row["response"])["input_ids"]) for row in rows]
        return folder, {
            "longest": [max(len(each[index]) for each in passes) for index in range(work.prompts)],
            "prompt_tokens": means([len(each) for each in ids], work.prompts),
            "answers": means(answers, work.prompts) if part.algo == "sft" else [work.new_tokens] * work.prompts,
        }

    def settings(self, name: str, side: str, folder: Path, lengths: dict[str, Any]) -> dict[str, Any]:
        """The settings of a side's worker."""
        args, part, work, program = self.args, PARTS[name], self.workload(PARTS[name]), SIDES[side]
        shared = {"model": args.ckpt, "dtype": args.dtype, "threads": args.threads}
        if side == "limit":
            rows = 0 if part.algo == "sft" else work.prompts * work.samples
            computed = min(sum(lengths["prompt_tokens"]) + work.samples * sum(lengths["answers"]), 2048)
            return shared | {"shape": vars(self.shape), "decode_rows": rows, "train_rows": computed}
        options = dict(program.options)
        if not part.trains:
            if side.startswith("llama"):
                options["gguf"] = self.gguf()
            per_sample = [work.new_tokens] * (work.prompts * work.samples)
            shape = {"device": "cpu", "prompts": lengths["longest"], "samples": work.samples, "lengths": per_sample}
            more = {"prompt_ids": 0, "prompt_file": str(folder / "prompts.json"), "passes": args.passes}
            return shared | shape | more | {"options": options}
        if program.tree:
            options |= {"dtype": args.dtype, "max_prompt_tokens": max(lengths["longest"]) + 16}
            options |= {"eager_decode": True} if args.decode == "eager" and part.algo != "sft" else {}
            options |= args.set if program.tree == "here" else {}
        else:
            options = program.trl_options(work.prompts * work.samples)
        counts = {"rows": work.prompts * work.samples, "prompts": work.prompts, "samples": work.samples}
        run = {"steps": args.steps, "warmup": args.warmup, "new_tokens": work.new_tokens, "algo": part.algo}
        places = {"folder": str(folder), "run_dir": tempfile.mkdtemp(dir=folder, prefix=f"{side}-") + "/run"}
        kept = {"checkpointing": program.checkpointing, "chat": self.tokenizer.chat_template is not None}
        return shared | counts | run | places | kept | {"options": options}

    def gguf(self) -> str:
        """Path of the GGUF file for llama.cpp."""
        if self.args.gguf:
            return str(self.args.gguf.resolve())
        from areno.engine.checkpoint.export import export_model

        kind = {"float32": "f32", "bfloat16": "bf16"}[self.args.dtype]
        file = self.folder / "gguf" / f"model-{kind}.gguf"
        if not file.exists():
            export_model(self.args.ckpt, str(file.parent), gguf=kind)
        return str(file)

    def environment(self, side: str, name: str, described: dict[str, Any]) -> dict[str, str]:
        """Which areno a worker imports, and its compile caches: one for each code, and empty at the first rollout."""
        tree = self.trees.get("here" if side == "limit" else SIDES[side].tree)
        rollout = side if not PARTS[name].trains else ""
        cache = PEERS / "cache" / "-".join(filter(None, [described.get("code", side), self.args.dtype, rollout]))
        if rollout and described["repeat"] == 0:
            shutil.rmtree(cache, ignore_errors=True)
        folders = {"ARENO_CACHE_DIR": "areno", "TORCHINDUCTOR_CACHE_DIR": "inductor", "VLLM_CACHE_ROOT": "vllm"}
        sources = {"PYTHONPATH": str(tree)} if tree else {}
        return sources | {variable: str(cache / sub) for variable, sub in folders.items()}

    def run(self, described: dict[str, Any]) -> None:
        """Run one process and record it; a peer that fails is recorded as failed."""
        name, side = described["part"], described["side"]
        program, part = SIDES[side], PARTS[name]
        folder, lengths = self.rows(name)
        settings, env = self.settings(name, side, folder, lengths), self.environment(side, name, described)
        script = WORKERS / program.script(part.trains)
        python = program.interpreter(self.args)
        # Processes that a worker starts with `python -m areno...` import from its working directory first.
        tree = self.trees.get(program.tree, ROOT)
        commit = self.args.against if program.tree == "against" else "HEAD"
        record: dict[str, Any] = {"described": described, "commit": git("rev-parse", "--short", commit)}
        record |= {"load_before": round(os.getloadavg()[0], 2), "gflops_before": probe(self.args.threads)}
        if program.tree and part.trains and part.algo != "sft" and self.args.decode == "compiled":
            built = run_worker(python, script, {"build": True, **settings}, env, cwd=tree)
            record["decode_step_build_s"] = round(built["seconds"], 1)
        began = time.monotonic()
        try:
            record["result"] = run_worker(python, script, settings, env, cwd=tree)
        except WorkerFailedError as error:
            if program.tree == "here" or side == "limit":
                raise
            record["failed"] = str(error)[-2000:]
        record |= {"took_s": round(time.monotonic() - began, 1), "lengths": lengths}
        self.keep(record)

    def keep(self, record: dict[str, Any]) -> None:
        """Add a record, replace those of the same side with other settings, and write the file."""

        def settings(one: dict[str, Any]) -> dict[str, Any]:
            return {key: value for key, value in one["described"].items() if key != "repeat"}

        def replaced(one: dict[str, Any]) -> bool:
            same = all(one["described"][key] == record["described"][key] for key in ("part", "side"))
            return same and (settings(one) != settings(record) or one["described"] == record["described"])

        self.result["runs"] = [one for one in self.result["runs"] if not replaced(one)] + [record]
        self.result["parts"] = summarize(self.result["runs"], self.shape)
        if self.file:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            (part := self.file.with_suffix(".part")).write_text(json.dumps(self.result, indent=1) + "\n")
            part.replace(self.file)

    def left(self, name: str) -> list[dict[str, Any]]:
        """Processes of a part that are still to run, with the sides interleaved."""
        sides = self.sides(name)
        wanted = [self.descriptor(name, side, repeat) for repeat in range(self.args.repeats) for side in sides]
        done = [one["described"] for one in self.result["runs"] if "result" in one]
        return [each for each in wanted if each not in done]

    def out_of_time(self, described: dict[str, Any]) -> bool:
        """Whether a process would not end in time, judging by the last one of the same side."""
        if self.args.minutes is None:
            return False
        like = [one for one in self.result["runs"] if one["described"]["part"] == described["part"]]
        took = [one["took_s"] for one in like if one["described"]["side"] == described["side"]]
        return time.monotonic() - self.began + (took[-1] if took else 0) > 60 * self.args.minutes


def means(numbers: list[int], count: int) -> list[int]:
    """Means over every ``count``-th number, one starting at each of the first ``count`` numbers."""
    return [round(statistics.mean(numbers[index::count])) for index in range(count)]


def instructions() -> str:
    """The widest vector instructions that PyTorch uses on this machine."""
    import torch

    return str(torch.backends.cpu.get_cpu_capability())


def measure(bench: Bench) -> int:
    """Measure all parts; returns how many processes are left because the time ran out."""
    left = [described for name in bench.args.parts for described in bench.left(name)]
    failed: set[tuple[str, str]] = set()
    for number, described in enumerate(left):
        key = (described["part"], described["side"])
        if key in failed:
            continue
        if number and bench.out_of_time(described):
            return len(left) - number
        bench.run(described)
        if "failed" in bench.result["runs"][-1]:
            failed.add(key)
    return 0


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    if args.avx2:
        os.environ.update(AVX2)  # before torch is loaded, here and in every worker
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, Path(folder))
        left = measure(bench)
    bench.result["parts"] = summarize(bench.result["runs"], bench.shape)
    for name in args.parts:
        if name in bench.result["parts"]:
            show(name, bench.result["parts"][name])
    if left:
        print(f"{left} processes are left; the same command with --save goes on with them")
    for name, part in bench.result["parts"].items():
        check(name, part)
    print(json.dumps(bench.result))


if __name__ == "__main__":
    main(sys.argv[1:])
