"""The entry points of an earlier RL Swarm, kept under their names; all the work is done by `rl_swarm`."""
