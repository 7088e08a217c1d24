"""Check that a model is available locally or on the Hugging Face Hub, before the model is loaded."""

import time
from contextlib import suppress
from pathlib import Path

from areno.errors import UsageError

_TRIES, _TIMEOUT_S = 2, 10.0


def check_reachable(path: str) -> None:
    """Raise UsageError if a model is neither in a folder, nor in the Hugging Face cache, nor on a reachable hub."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    if Path(path).is_dir():
        return
    not_local = f"{path} is neither a folder nor a model in the Hugging Face cache"
    try:
        if isinstance(try_to_load_from_cache(path, "config.json"), str):
            return
        url = hf_hub_url(path, "config.json")
    except HFValidationError:
        raise UsageError(
            f"{path} is neither a folder nor a valid hub id; use an existing checkpoint folder or a hub id"
        ) from None
    if constants.HF_HUB_OFFLINE:
        raise UsageError(f"{not_local}, and HF_HUB_OFFLINE disables the hub; check the path, or unset HF_HUB_OFFLINE")
    for attempt in range(_TRIES):
        try:
            with suppress(EntryNotFoundError):  # a repository with only an adapter has no config.json
                get_hf_file_metadata(url, timeout=_TIMEOUT_S)
            return
        except GatedRepoError as error:
            raise UsageError(
                f"{not_local}, and the hub gives access only on request; request access at {constants.ENDPOINT}/{path}, "
                "and run `hf auth login`"
            ) from error
        except RepositoryNotFoundError as error:
            raise UsageError(
                f"{not_local}, and the hub has no such model; check the spelling; for a private model, run `hf auth login`"
            ) from error
        except HfHubHTTPError:
            return  # the hub is reachable; other problems are reported when loading
        except Exception as error:  # network errors of any HTTP library
            if attempt + 1 == _TRIES:
                raise UsageError(
                    f"{not_local}, and the hub is unreachable ({type(error).__name__}: {error}); check the path and the "
                    "network"
                ) from error
            time.sleep(1.0)
