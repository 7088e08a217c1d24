"""``areno export``: merges an adapter into its base model and writes a full checkpoint."""

from collections.abc import Sequence

from areno.config.eval_options import parse_export


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    options = parse_export(argv)
    from areno.engine.checkpoint.export import export_model

    folder = export_model(
        str(options.ckpt),
        str(options.output),
        dtype=None if options.dtype == "auto" else options.dtype,
        gguf=options.gguf,
        trust_remote_code=options.trust_remote_code,
    )
    print(f"full checkpoint of {options.ckpt}: {folder}")
    if options.gguf:
        print(f"for llama.cpp and Ollama: {folder / f'model-{options.gguf}.gguf'}")
    return 0
