"""The subcommands of ``dynamiq-ddp``, one module each.

``register`` adds a parser, and sets ``run``, which returns a `Result` or, on ranks that have none, None; ``json``,
unless it is an option; and ``on_every_rank``, whether all ranks of a launcher have to run it.
"""
