"""Bringing a trained node to the Hugging Face Hub: exported to a temporary folder, uploaded as one commit.

Everything that can go wrong here without the Hub is looked at first, so that nothing is left half-done on either side.
The token is read, sent and never shown: what the Hub's library says is looked through for it before it is repeated.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rl_swarm.errors import HubError
from rl_swarm.experiment import Experiment
from rl_swarm.export import Checkpoint, export_model, find_checkpoint
from rl_swarm.models.hub_ids import is_hub_id


class Destination(NamedTuple):
    repo: str
    private: bool = False


def push_model(
    experiment: Experiment,
    node: str,
    round: int | None,
    to: Destination,
    token: str | None,
    say: Callable[[str], None],
    *,
    dry_run: bool = False,
) -> None:
    """Upload a node's checkpoint of a round, of the newest where none is given."""
    _check_repo(to.repo)
    secret = None if dry_run else _find_token(token, to.repo)
    checkpoint = find_checkpoint(experiment, node, round)
    if secret is not None:
        _check_token(secret, to)
    with tempfile.TemporaryDirectory(prefix="rl-swarm-push-") as folder:
        say(f"Exporting {node} of {experiment.name} after round {checkpoint.round}.")
        _export(experiment, checkpoint, Path(folder), to, secret or token)
        files = sorted(Path(folder).iterdir())
        listed = ", ".join(f"{path.name} {_size(path.stat().st_size)}" for path in files)
        say(f"{len(files)} files, {_size(sum(path.stat().st_size for path in files))}: {listed}.")
        if secret is None:
            say(f"Nothing was uploaded: without --dry-run it would go to {to.repo}{' (private)' * to.private}.")
            return
        say(f"Uploading to {to.repo}{' (private)' * to.private}.")
        message = f"{experiment.name}: {node} after round {checkpoint.round}"
        say(f"It is at {_upload(Path(folder), to, secret, message)}")


def _check_repo(repo: str) -> None:
    if not is_hub_id(repo):
        raise HubError(
            f"The Hub allows no repository {repo!r}: a name is OWNER/NAME, of letters, digits, '_', and single '-' or "
            "'.' between them, neither over 96 characters."
        )


def _find_token(given: str | None, repo: str) -> str:
    """The token of the settings, else that of the Hub's own login."""
    from huggingface_hub import get_token
    from huggingface_hub.constants import ENDPOINT

    with _hub_trouble(repo):
        token = (given or get_token() or "").strip()
    if not token:
        raise HubError(
            f"There is no Hub token: make one that may write at {ENDPOINT}/settings/tokens and set it as "
            "HUGGINGFACE_ACCESS_TOKEN, or run `hf auth login`."
        )
    if not token.isascii() or not token.isprintable() or " " in token:
        raise HubError(
            "HUGGINGFACE_ACCESS_TOKEN, or what `hf auth login` kept, is no token of the Hub: those are letters, digits "
            "and '_' alone."
        )
    return token


def _check_token(token: str, to: Destination) -> None:
    """Ask the Hub who this is: a model may be large, and a wrong token is better known before it is exported."""
    from huggingface_hub import HfApi

    with _hub_trouble(to.repo, token):
        HfApi(token=token).whoami()


def _export(experiment: Experiment, checkpoint: Checkpoint, folder: Path, to: Destination, token: str | None) -> None:
    try:
        export_model(experiment, checkpoint, folder, repo=to.repo, token=token)
    except OSError as error:
        raise HubError(
            f"Cannot export to {folder.parent}: {error.strerror or error}; TMPDIR names another place to work in."
        ) from None


def _upload(folder: Path, to: Destination, token: str, message: str) -> str:
    """One commit; returns the address of the repository."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils.tqdm import disable_progress_bars

    # The library's warnings tell of each attempt; if none succeeds, one sentence says so.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        disable_progress_bars()
    api = HfApi(token=token)
    with _hub_trouble(to.repo, token):
        # Without --private, the owner's own default counts.
        api.create_repo(to.repo, private=to.private or None, exist_ok=True)
        if to.private and not api.model_info(to.repo).private:
            raise HubError(
                f"{to.repo} is there already and public, so nothing was uploaded: make it private at "
                f"{api.endpoint}/{to.repo}/settings, or give another --repo."
            )
        api.upload_folder(repo_id=to.repo, folder_path=folder, commit_message=message)
    return f"{api.endpoint}/{to.repo}"


@contextmanager
def _hub_trouble(repo: str, token: str = "") -> Iterator[None]:
    """Whatever the Hub, its library or the way to it raises becomes one sentence."""
    try:
        yield
        return
    except (_no_connection(), OSError, RuntimeError, ValueError) as error:
        sentence = _sentence(error, repo)
    # Raised out here, where nothing holds on to the library's error: its progress bars end before the sentence.
    raise HubError(sentence.replace(token, "(the token)") if token else sentence)


def _sentence(error: BaseException, repo: str) -> str:
    from huggingface_hub.constants import ENDPOINT
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    for cause in _causes(error):
        if isinstance(cause, HfHubHTTPError):
            if not str(cause.response.url).startswith(ENDPOINT):
                return f"The Hub's storage does not take the upload ({cause.response.status_code}): try again."
            return _refusal(cause.response.status_code, _first_line(cause.server_message or ""), repo)
        if isinstance(cause, OfflineModeIsEnabled):
            return "The Hub's library was told to stay offline: unset HF_HUB_OFFLINE."
        if isinstance(cause, _no_connection()):
            return f"The Hub at {ENDPOINT} cannot be reached: check the network and try again."
    return f"The upload to {repo} did not succeed: {_first_line(str(error)) or type(error).__name__}."


def _refusal(status: int, said: str, repo: str) -> str:
    """What the Hub's answer means for the user."""
    from huggingface_hub.constants import ENDPOINT

    owner, tokens = repo.partition("/")[0], f"{ENDPOINT}/settings/tokens"
    if status == 401:
        return f"The Hub does not know this token: make one that may write at {tokens}, or run `hf auth login` again."
    if status == 403:
        return f"This token may not write to {repo}: it needs the right to write for {owner} ({tokens})."
    if status == 404:
        return f"The Hub has no {repo}, or this token may not see it: check the owner's name."
    if status == 429:
        return "The Hub wants fewer requests: try again in some minutes."
    if status >= 500:
        return f"The Hub has trouble of its own ({status}): try again later."
    return f"The Hub does not take {repo} ({status}): {said or 'it gives no reason'}."


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what lies behind it: a failed part of an upload is wrapped by the library."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _no_connection() -> type[Exception]:
    from huggingface_hub import errors

    # The library has changed more than once what it speaks HTTP with, and always imports the base of its errors here.
    base: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]
    return base


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0].strip().rstrip(".") if lines else ""


def _size(count: int) -> str:
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB"):
        if size >= 1000:
            size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
