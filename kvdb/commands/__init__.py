"""The commands of `kvdb`, one module each.

A command is a module with a function `add(subparsers)`, which declares the command's arguments and sets `run`: a function that
takes the parsed arguments, prints to stdout and returns the exit status. To add one, write the module and name it in COMMANDS.
"""

import kvdb.commands.calibrate as calibrate
import kvdb.commands.completion as completion
import kvdb.commands.config as config
import kvdb.commands.doctor as doctor
import kvdb.commands.explain as explain
import kvdb.commands.export as export
import kvdb.commands.indexes as indexes
import kvdb.commands.keep as keep
import kvdb.commands.ls as ls
import kvdb.commands.ping as ping
import kvdb.commands.serve as serve
import kvdb.commands.stats as stats
import kvdb.commands.token as token
import kvdb.commands.top as top
import kvdb.commands.verify as verify

COMMANDS = (serve, ping, ls, keep, indexes, verify, export, calibrate, doctor, stats, top, explain, token, config, completion)
"""In the order in which `kvdb --help` lists them."""
