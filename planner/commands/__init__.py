"""The planner's subcommands of ``tensorpager``."""
