"""Every error this package raises on purpose, and what becomes of each.

SwarmError                 the command ends with exit code 1 and the sentence
├── SettingsError          exit code 2: the user can mend it before anything starts
├── ExperimentMissing      a worker waits for it, visibly; every other command ends
├── ExperimentExists       nothing was written
├── ExperimentReplaced     the experiment was deleted or made anew under a running node: the node ends
├── Stopped                asked to end while it waited: not a failure, exit code 0
├── NameTaken              another live process holds this node name or the coordinator's seat
├── ModelError             a model folder that cannot be loaded
├── LearningFailed         three updates in a row were not numbers: the node ends, its weights as they were
├── CheckpointError        this checkpoint is passed over for the next older one
├── HubError               the Hugging Face Hub refuses, or cannot be reached: nothing was uploaded
├── StoreError
│   ├── KeyMissing         most callers expect it: the file is simply not there (yet)
│   ├── KeyExists          a create-only write came second
│   └── StoreUnavailable   read-only, full, unmounted, no permission: running nodes wait until it is mended
└── MalformedRecord        something a peer wrote is not acceptable: counted under `reason`, never fatal
"""

from __future__ import annotations


class SwarmError(Exception):
    """Base of the tree; its text is a sentence for the user."""


class SettingsError(SwarmError):
    pass


class ExperimentMissing(SwarmError):
    pass


class ExperimentExists(SwarmError):
    pass


class ExperimentReplaced(SwarmError):
    pass


class Stopped(SwarmError):
    pass


class NameTaken(SwarmError):
    pass


class ModelError(SwarmError):
    pass


class LearningFailed(SwarmError):
    pass


class CheckpointError(SwarmError):
    pass


class HubError(SwarmError):
    pass


class StoreError(SwarmError):
    pass


class KeyMissing(StoreError):
    pass


class KeyExists(StoreError):
    pass


class StoreUnavailable(StoreError):
    pass


class MalformedRecord(SwarmError):
    """`reason` is a short fixed word: it becomes a key in the metrics row."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
