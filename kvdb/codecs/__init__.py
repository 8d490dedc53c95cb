"""How blocks of segments hold keys and values: `base` is the frame, `registry` the codecs by name, and each is one file."""
