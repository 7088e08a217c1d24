"""Whether a model that is not a folder can be had from the hub, before anything waits for it."""

import time
from contextlib import suppress
from pathlib import Path

from areno.errors import UsageError

_TRIES, _TIMEOUT_S = 2, 10.0


def check_reachable(path: str) -> None:
    """Check that a model is a folder, in the Hugging Face cache, or on a hub that answers. Raises UsageError: none of these."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    if Path(path).is_dir():
        return
    neither = f"{path} is not a folder, and the Hugging Face cache does not hold a model of this name"
    try:
        if isinstance(try_to_load_from_cache(path, "config.json"), str):
            return
        url = hf_hub_url(path, "config.json")
    except HFValidationError:
        raise UsageError(
            f"{path} is not a folder, and cannot be a hub id; give a checkpoint folder that exists"
        ) from None
    if constants.HF_HUB_OFFLINE:
        raise UsageError(f"{neither}; HF_HUB_OFFLINE forbids to ask the hub")
    for attempt in range(_TRIES):
        try:
            with suppress(EntryNotFoundError):  # adapters alone have no config.json
                get_hf_file_metadata(url, timeout=_TIMEOUT_S)
            return
        except RepositoryNotFoundError as error:
            raise UsageError(
                f"{neither}, nor does the hub; check the spelling, and for a private model log in with hf auth login"
            ) from error
        except HfHubHTTPError:
            return  # the hub answers: what it lacks is said by whoever loads
        except Exception as error:  # of the network, in the words of whatever library asks
            if attempt + 1 == _TRIES:
                raise UsageError(
                    f"{neither}; the hub cannot be reached ({type(error).__name__}: {error}): check the path, or the network"
                ) from error
            time.sleep(1.0)
