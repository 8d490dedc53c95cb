"""What plugs kvdb into inference engines. Importing it changes nothing in them."""
