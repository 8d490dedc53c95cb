"""Which contexts go first where room is short: pure policies, one a file, that are told sizes and uses."""
