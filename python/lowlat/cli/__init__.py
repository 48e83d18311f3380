"""The command ``lowlat``: one module a subcommand, each with ``add_parser`` and ``run``."""
