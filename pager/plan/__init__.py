"""The access log, a trace of it, the planner as a process, following a plan."""
