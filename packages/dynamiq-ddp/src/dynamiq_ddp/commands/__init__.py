"""The subcommands of ``dynamiq-ddp``, one module each: ``register`` adds a parser, and sets what runs."""
