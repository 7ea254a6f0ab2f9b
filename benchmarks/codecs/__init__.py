"""How fast the codecs encode and decode, against a plain copy of the same bytes."""
