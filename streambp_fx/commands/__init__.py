"""The commands of ``streambp``: one file each, added to the application by `streambp_fx.cli`."""
