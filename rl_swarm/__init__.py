"""RL Swarm: collective reinforcement learning of language models through a shared folder.

Importing this package loads no torch; the modules that need it are loaded when a model is.
"""

__version__ = "0.1.0"
